"""A step's metrics by the source of a mixture: reward, solved prompts, lengths, and pass@k on the training prompts."""

from __future__ import annotations

from collections.abc import Sequence

from megasharp.common.records import Group, Outcome
from megasharp.evals.estimators import pass_at_k


def source_metrics(groups: Sequence[Group], sources: Sequence[str]) -> dict[str, float]:
    """Return the metrics of each of `sources` that has groups in this step, those included that selection dropped.

    As in `group_metrics` an infra failure counts in no figure but lengths. With <source> for a source's name:

    - `group/<source>/prompts`, `group/<source>/dropped`: groups in all, and those that selection refused.
    - `reward/<source>/mean`: over responses.
    - `group/<source>/solved_all`, `group/<source>/solved_none`: shares of groups.
    - `group/<source>/pass@<k>`: for each power of two, the mean over groups with so many responses of the estimate of
      2107.03374: of the policy that trains, with its temperature, on prompts that it trains on.
    - `rollout/<source>/length_mean`, `rollout/<source>/truncated`: mean response tokens of the policy; share at the
      length limit.
    """
    found: dict[str, float] = {}
    for source in sources:
        own = [group for group in groups if group.prompt.source == source]
        if own:
            figures = {**_of_groups(own), **_of_responses(own)}
            found |= {f"{subject}/{source}/{figure}": value for (subject, figure), value in figures.items()}
    return found


def _of_groups(groups: Sequence[Group]) -> dict[tuple[str, str], float]:
    outcomes = [[response.verdict.outcome for response in group.responses] for group in groups]
    scored = [(len(each) - each.count(Outcome.INFRA), each.count(Outcome.CORRECT)) for each in outcomes]
    judged = [(size, correct) for size, correct in scored if size]
    figures = {"prompts": float(len(groups)), "dropped": float(sum(g.dropped_reason is not None for g in groups))}
    if judged:
        figures["solved_all"] = sum(size == correct for size, correct in judged) / len(judged)
        figures["solved_none"] = sum(not correct for _, correct in judged) / len(judged)
    k = 1
    while large := [pair for pair in judged if pair[0] >= k]:
        figures[f"pass@{k}"] = sum(pass_at_k(size, correct, k) for size, correct in large) / len(large)
        k *= 2
    return {("group", name): value for name, value in figures.items()}


def _of_responses(groups: Sequence[Group]) -> dict[tuple[str, str], float]:
    responses = [response for group in groups for response in group.responses]
    rewards = [r.verdict.reward for r in responses if r.verdict.outcome is not Outcome.INFRA]
    cut = sum(response.completion.truncated for response in responses)
    return {
        **({("reward", "mean"): sum(rewards) / len(rewards)} if rewards else {}),
        ("rollout", "length_mean"): sum(response.policy_tokens for response in responses) / len(responses),
        ("rollout", "truncated"): cut / len(responses),
    }
