"""The metrics of a step: of its groups before the update, of its advantages, and of the tokens that the update sees.

`group_metrics` counts every group, also those that selection dropped: they were sampled, and leaving them out would
bias the mean reward. An infra failure says nothing about the policy, so such a response counts in its outcome's share
only. `advantage_metrics` and `token_metrics` return records that still add up over micro-batches and ranks (a mean
with its weight, a maximum); `flatten` turns them into plain numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasharp.common.records import (
    THINKING_OPEN,
    Group,
    Maximum,
    Mean,
    Metrics,
    Outcome,
    Response,
    StepBatch,
    TokenInputs,
)
from megasharp.ops.segment import means_on_host, segment_mean, segment_sum


def flatten(metrics: Metrics) -> dict[str, float]:
    """Return the value of every metric. A Mean over nothing (weight 0) has no value and no entry.

    Example: `flatten({"clipped": Mean(3.0, 12.0), "entropy/correct": Mean(0.0, 0.0)}) == {"clipped": 0.25}`.
    """
    valued = {name: one for name, one in metrics.items() if isinstance(one, Maximum) or one.weight > 0}
    return {name: float(metric.value) for name, metric in valued.items()}


HARDNESS_BINS = 5


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of `groups`; empty when there are no responses.

    - `reward/mean`: over responses without an infra failure; absent when every response failed that way.
    - `reward/outcome_<outcome>`: shares of all responses; the six add up to 1.
    - `reward/errors`: share of the responses that came to a verifier, in which it failed; absent when none came to one.
    - `reward/thinking_open`: share of all responses that a task's verifier refused because thinking was never closed.
    - `reward/function/<name>`: mean over the responses that this one of several functions applied to, without weight.
    - `group/solved_all`, `group/solved_none`, `group/uniform` (all rewards equal, so no advantage): shares of
      groups.
    - `group/distinct_correct`: mean number of distinct canonical answers among a group's correct responses.
    - `group/hardness_0.0_0.2` .. `group/hardness_0.8_1.0`: shares of correct responses by the share of wrong responses
      in their group, which is the weight that IAC with alpha 1 gives them (2601.15609); absent without correct ones.
    - `group/answer_entropy`: mean entropy, in nats, of a group's answers; all responses without a canonical answer are
      one class (2510.04028 C.5).
    - `group/dropped` and `group/dropped_<reason>`: counts of groups that selection refused.
    - `rollout/length_mean`, `rollout/length_max`, `rollout/tokens` (sum): the policy's response tokens, the end token
      included, those of environments left out.
    - `rollout/truncated`: share of responses that met the length limit.
    - `rollout/turns`, `rollout/turn_tokens`: mean turns of the policy in a response that environments answer, and mean
      tokens of a turn; `rollout/turns_cut`: share of these responses that ended at the limit of turns;
      `rollout/environment_failed`: share whose environment failed; `rollout/environment_tokens`: share of their tokens
      that environments said; `rollout/context_max`: tokens of the longest, those of environments included. Only where
      there are such responses.
    - `rollout/sampler_policy_gap`: mean over tokens of |sampler log-prob - policy log-prob|, in nats.
    - `memory/argmax_moved`, `memory/responses_moved`: shares of sampled tokens, and of responses with at least one,
      before which the calibrated distribution's likeliest token was another one than the policy's;
      `memory/calibration_kl`: mean over tokens of KL(calibrated || policy), in nats. Only where a memory network took
      part in sampling.
    """
    responses = [response for group in groups for response in group.responses]
    if not responses:
        return {}
    outcomes = Counter(response.verdict.outcome for response in responses)
    rewards = [response.verdict.reward for response in _judged(responses)]
    thinking = sum(response.verdict.detail == THINKING_OPEN for response in responses)
    failed = [response for response in responses if response.verdict.failure]
    tried = len(rewards) + sum(response.verdict.outcome is Outcome.INFRA for response in failed)
    reasons = Counter(group.dropped_reason for group in groups if group.dropped_reason is not None)
    return {
        **{f"reward/outcome_{outcome}": outcomes[outcome] / len(responses) for outcome in Outcome},
        **({"reward/mean": sum(rewards) / len(rewards)} if rewards else {}),
        **({"reward/errors": len(failed) / tried} if tried else {}),
        "reward/thinking_open": thinking / len(responses),
        **_function_metrics(responses),
        **_answer_metrics(groups),
        "group/dropped": float(reasons.total()),
        **{f"group/dropped_{reason}": float(count) for reason, count in sorted(reasons.items())},
        **_rollout_metrics(responses),
        **_turn_metrics(responses),
        **_memory_metrics(responses),
    }


def _function_metrics(responses: Sequence[Response]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for response in _judged(responses):
        for name, value in response.verdict.parts.items():
            parts.setdefault(f"reward/function/{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(parts.items())}


def _judged(responses: Sequence[Response]) -> list[Response]:
    return [response for response in responses if response.verdict.outcome is not Outcome.INFRA]


def _answer_metrics(groups: Sequence[Group]) -> dict[str, float]:
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
        **_hardness_shares([(len(right), len(all_)) for all_, right in pairs]),
    }


def _distinct_answers(responses: Sequence[Response]) -> int:
    return len({r.verdict.canonical_answer for r in responses} - {None})


def _hardness_shares(counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Bin (correct, all) of every group by its share of wrong responses; the last bin includes its upper end."""
    total = sum(correct for correct, _ in counts)
    if not total:
        return {}
    shares = [0.0] * HARDNESS_BINS
    for correct, size in counts:
        # In integers: 2 of 5 wrong is exactly a bin's edge, which 0.4 * 5 in floating point may miss.
        shares[min((size - correct) * HARDNESS_BINS // size, HARDNESS_BINS - 1)] += correct / total
    return {f"group/hardness_{i / HARDNESS_BINS}_{(i + 1) / HARDNESS_BINS}": share for i, share in enumerate(shares)}


def _answer_entropy(responses: Sequence[Response]) -> float:
    shares = [count / len(responses) for count in Counter(r.verdict.canonical_answer for r in responses).values()]
    return -sum(share * math.log(share) for share in shares)


def _rollout_metrics(responses: Sequence[Response]) -> dict[str, float]:
    lengths = [response.policy_tokens for response in responses]
    truncated = sum(response.completion.truncated for response in responses)
    figures = {
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/truncated": truncated / len(responses),
    }
    if sum(lengths):
        completions = [response.completion for response in responses]
        sampler_T = torch.cat([each.of_policy(each.sampler_logp) for each in completions])
        policy_T = torch.cat([each.of_policy(each.policy_logp) for each in completions])
        figures["rollout/sampler_policy_gap"] = float((sampler_T.double() - policy_T.double()).abs().mean())
    return figures


def _turn_metrics(responses: Sequence[Response]) -> dict[str, float]:
    played = [(response, episode) for response in responses if (episode := response.completion.episode) is not None]
    if not played:
        return {}
    said, tokens = sum(one.policy_tokens for one, _ in played), sum(one.length for one, _ in played)
    turns = sum(len(one.turns) for one, _ in played)
    return {
        "rollout/turns": turns / len(played),
        "rollout/turns_cut": sum(episode.cut for _, episode in played) / len(played),
        "rollout/environment_failed": sum(bool(episode.failure) for _, episode in played) / len(played),
        "rollout/context_max": float(max(one.length for one, _ in played)),
        **({"rollout/turn_tokens": said / turns} if turns else {}),
        **({"rollout/environment_tokens": 1.0 - said / tokens} if tokens else {}),
    }


def _memory_metrics(responses: Sequence[Response]) -> dict[str, float]:
    completions = [response.completion for response in responses]
    moved = [c.of_policy(c.argmax_moved).double() for c in completions if c.argmax_moved is not None and c.length]
    kl = [c.of_policy(c.calibration_kl).double() for c in completions if c.calibration_kl is not None]
    if not moved:
        return {}
    return {
        "memory/argmax_moved": float(torch.cat(moved).mean()),
        "memory/responses_moved": sum(bool(moved_T.any()) for moved_T in moved) / len(moved),
        "memory/calibration_kl": float(torch.cat(kl).mean()),
    }


def advantage_metrics(batch: StepBatch) -> Metrics:
    """Return metrics over the step's unmasked tokens, after advantages are calibrated.

    - `group/zero_advantage`: share of the step's groups in which no token has an advantage: they give no gradient.
    - `policy/advantage_positive`, `policy/advantage_negative`: sums of positive and of negative advantages per
      response token, whose balance says whether a step mostly raises or mostly lowers probabilities.
    """
    groups = len(batch.group_ids)
    moved_G = torch.zeros(groups, dtype=torch.float64)
    positive = negative = tokens = 0.0
    for micro in (micro for mini in batch.mini_batches for rank in mini.per_rank for micro in rank):
        kept_T = micro.inputs.mask_T > 0
        adv_T, group_T = micro.advantage_T[kept_T].double(), micro.inputs.group_T[kept_T]
        moved_G += segment_sum(adv_T.abs(), group_T, groups)
        positive += float(adv_T.clamp(min=0.0).sum())
        negative += float(adv_T.clamp(max=0.0).sum())
        tokens += adv_T.numel()
    return {
        "group/zero_advantage": Mean(float((moved_G == 0.0).sum()), float(groups)),
        "policy/advantage_positive": Mean(positive, tokens),
        "policy/advantage_negative": Mean(negative, tokens),
    }


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Sizes of an update's metrics: the `candidates` most probable tokens, and `samples` draws of a next token."""

    candidates: int
    samples: int


def token_metrics(x: TokenInputs, candidates: int) -> Metrics:
    """Return the metrics of one micro-batch at the current policy; those of a step are the sums over its micro-batches.

    Only unmasked tokens count: what a masked one holds need not even be finite.

    - `entropy/policy`: mean over tokens, in nats. `entropy/response_mean`: mean over responses of the mean over their
      tokens (2510.04028 C.5). `entropy/correct`, `entropy/incorrect`: over tokens of correct and of other responses.
    - `candidates/lambda_1` .. `lambda_<candidates>`: response mean of token means of the log-prob of the n-th most
      probable token; `candidates/lambda_sample`: the same of the sampled token (2510.14807 equation 2).
    - `candidates/top1_rate`: share of sampled tokens that are the most probable one.
    - `policy/sampler_gap`: mean |log-prob now - log-prob of the sampler|, in nats.
    - `policy/engine_gap`, `policy/engine_gap_max`: mean and largest |log-prob before the update - the engine's record
      of the policy's own|, in nats.
    """
    assert x.logp_T is not None and x.entropy_T is not None
    assert x.sampler_logp_T is not None and x.policy_logp_T is not None
    assert x.topn_logp_TN is not None and x.is_top1_T is not None
    kept_K = (x.mask_T > 0).nonzero()[:, 0]
    logp_K, entropy_K = x.logp_T.detach()[kept_K], x.entropy_T.detach()[kept_K]
    correct_K = x.correct_T[kept_K] > 0
    responses = _Responses(x, kept_K)
    topn_logp_KN = x.topn_logp_TN.detach()[kept_K]
    engine_gap_K = (x.before_T[kept_K] - x.policy_logp_T[kept_K]).abs()
    sums = {
        "entropy/policy": _sums(entropy_K),
        "entropy/response_mean": responses.sums(entropy_K),
        "entropy/correct": _sums(entropy_K, correct_K),
        "entropy/incorrect": _sums(entropy_K, ~correct_K),
        "policy/sampler_gap": _sums((logp_K - x.sampler_logp_T[kept_K]).abs()),
        "policy/engine_gap": _sums(engine_gap_K),
        **{f"candidates/lambda_{n + 1}": responses.sums(topn_logp_KN[:, n]) for n in range(candidates)},
        "candidates/lambda_sample": responses.sums(logp_K),
        "candidates/top1_rate": _sums(x.is_top1_T[kept_K]),
    }
    largest = {"policy/engine_gap_max": Maximum(float(engine_gap_K.max()))} if engine_gap_K.numel() else {}
    return {**means_on_host(sums), **largest}


# A total and its weight.
_Sums = tuple[Tensor, Tensor]


class _Responses:
    """Means over a micro-batch's responses, each by its own unmasked tokens; a response without any does not count."""

    def __init__(self, x: TokenInputs, kept_K: Tensor) -> None:
        self._seq_K = x.seq_T[kept_K]
        self._count = x.num_sequences
        ones_K = torch.ones_like(self._seq_K, dtype=torch.float64)
        self._present_S = segment_sum(ones_K, self._seq_K, self._count) > 0

    def sums(self, value_K: Tensor) -> _Sums:
        """Sum the responses' means over tokens and count them; micro-batches add up, because no response is split."""
        mean_S = segment_mean(value_K.double(), self._seq_K, self._count)
        # A response without tokens has the mean 0 and adds nothing.
        return mean_S.sum(), self._present_S.sum()


def _sums(value_K: Tensor, counts_K: Tensor | None = None) -> _Sums:
    """Sum over all tokens, or over those that count, and count them."""
    counts_K = torch.ones_like(value_K, dtype=torch.bool) if counts_K is None else counts_K
    return torch.where(counts_K, value_K.double(), 0.0).sum(), counts_K.sum()
