"""The figures of one step's groups: rewards, outcomes, variety inside groups, lengths, sampler and policy.

All groups given count, those that selection dropped too: they were sampled, and leaving them out would bias
the mean reward. An infra failure says nothing about the policy: such responses count in their outcome's share
only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from megasharp.types import FinishReason, Group, Outcome, Response

HARDNESS_BINS = 5


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Figures of `groups`; empty when there are no responses.

    - `reward/mean`: over responses without an infra failure; absent when every response failed that way.
    - `reward/outcome_<outcome>`: shares of all responses; the six add up to 1.
    - `group/solved_all`, `group/solved_none`, `group/uniform` (all rewards equal, so no advantage): shares of
      groups.
    - `group/distinct_correct`: mean number of distinct canonical answers among a group's correct responses.
    - `group/hardness_0.0_0.2` .. `group/hardness_0.8_1.0`: shares of correct responses by the share of wrong responses
      in their group, which is the weight that IAC with alpha 1 gives them (2601.15609); absent without correct ones.
    - `group/answer_entropy`: mean entropy, in nats, of a group's answers; all responses without a canonical answer are
      one class (2510.04028 C.5).
    - `group/dropped` and `group/dropped_<reason>`: counts of groups that selection refused.
    - `rollout/length_mean`, `rollout/length_max`, `rollout/tokens` (sum): response tokens, the end token
      included.
    - `rollout/truncated`: share of responses that met the length limit.
    - `rollout/sampler_policy_gap`: mean over tokens of |sampler log-prob - policy log-prob|, in nats.
    - `memory/argmax_moved`, `memory/responses_moved`: shares of sampled tokens, and of responses with at least one,
      before which the calibrated distribution's likeliest token was another one than the policy's;
      `memory/calibration_kl`: mean over tokens of KL(calibrated || policy), in nats. Only where a memory network took
      part in sampling.
    """
    responses = [response for group in groups for response in group.responses]
    if not responses:
        return {}
    return {
        **_reward_figures(responses),
        **_group_figures(groups),
        **_dropped_figures(groups),
        **_rollout_figures(responses),
        **_memory_figures(responses),
    }


def _judged(responses: Sequence[Response]) -> list[Response]:
    return [response for response in responses if response.verdict.outcome is not Outcome.INFRA]


def _reward_figures(responses: Sequence[Response]) -> dict[str, float]:
    outcomes = Counter(response.verdict.outcome for response in responses)
    figures = {f"reward/outcome_{outcome}": outcomes[outcome] / len(responses) for outcome in Outcome}
    rewards = [response.verdict.reward for response in _judged(responses)]
    if rewards:
        figures["reward/mean"] = sum(rewards) / len(rewards)
    return figures


def _group_figures(groups: Sequence[Group]) -> dict[str, float]:
    judged = [responses for group in groups if (responses := _judged(group.responses))]
    if not judged:
        return {}
    correct = [[r for r in responses if r.verdict.outcome is Outcome.CORRECT] for responses in judged]
    pairs = list(zip(judged, correct, strict=True))
    return {
        "group/solved_all": sum(len(right) == len(all_) for all_, right in pairs) / len(pairs),
        "group/solved_none": sum(not right for right in correct) / len(pairs),
        "group/uniform": sum(len({r.verdict.reward for r in all_}) == 1 for all_ in judged) / len(pairs),
        "group/distinct_correct": sum(map(_distinct_answers, correct)) / len(pairs),
        "group/answer_entropy": sum(map(_answer_entropy, judged)) / len(pairs),
        **_hardness_figures([(len(right), len(all_)) for all_, right in pairs]),
    }


def _distinct_answers(responses: Sequence[Response]) -> int:
    return len({r.verdict.canonical_answer for r in responses} - {None})


def _hardness_figures(counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """From (correct, all) of every group; the last of the equal bins includes its upper end."""
    total = sum(correct for correct, _ in counts)
    if not total:
        return {}
    shares = [0.0] * HARDNESS_BINS
    for correct, size in counts:
        # Integers: 2 of 5 wrong is a bin's end, which 0.4 times 5 in binary need not reach.
        shares[min((size - correct) * HARDNESS_BINS // size, HARDNESS_BINS - 1)] += correct / total
    return {f"group/hardness_{i / HARDNESS_BINS}_{(i + 1) / HARDNESS_BINS}": share for i, share in enumerate(shares)}


def _answer_entropy(responses: Sequence[Response]) -> float:
    shares = [count / len(responses) for count in Counter(r.verdict.canonical_answer for r in responses).values()]
    return -sum(share * math.log(share) for share in shares)


def _dropped_figures(groups: Sequence[Group]) -> dict[str, float]:
    reasons = Counter(group.dropped_reason for group in groups if group.dropped_reason is not None)
    counts = {f"group/dropped_{reason}": float(count) for reason, count in sorted(reasons.items())}
    return {"group/dropped": float(reasons.total()), **counts}


def _rollout_figures(responses: Sequence[Response]) -> dict[str, float]:
    lengths = [response.length for response in responses]
    truncated = sum(response.completion.finish_reason is FinishReason.LENGTH for response in responses)
    figures = {
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/truncated": truncated / len(responses),
    }
    if sum(lengths):
        figures["rollout/sampler_policy_gap"] = _sampler_policy_gap(responses)
    return figures


def _sampler_policy_gap(responses: Sequence[Response]) -> float:
    sampler_T = torch.cat([response.completion.sampler_logp for response in responses])
    policy_T = torch.cat([response.completion.policy_logp for response in responses])
    return float((sampler_T.double() - policy_T.double()).abs().mean())


def _memory_figures(responses: Sequence[Response]) -> dict[str, float]:
    completions = [response.completion for response in responses]
    moved = [c.argmax_moved.double() for c in completions if c.argmax_moved is not None and c.argmax_moved.numel()]
    kl = [c.calibration_kl.double() for c in completions if c.calibration_kl is not None]
    if not moved:
        return {}
    return {
        "memory/argmax_moved": float(torch.cat(moved).mean()),
        "memory/responses_moved": sum(bool(moved_T.any()) for moved_T in moved) / len(moved),
        "memory/calibration_kl": float(torch.cat(kl).mean()),
    }
