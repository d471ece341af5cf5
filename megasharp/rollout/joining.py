"""Responses sampled in several parts, perhaps by several policy versions: joining them, and how old tokens are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megasharp.types import Completion, FinishReason, Group, SamplingParams, VersionSpan


def join(earlier: Completion, later: Completion) -> Completion:
    """The response that `later` continues: both parts' tokens, ended as `later` ended.

    Version spans of `later` count from its own first token. Adjacent spans of one version become one. Both parts were
    sampled with a memory network or both without.
    """
    if not earlier.tokens.numel():
        return later
    if not later.tokens.numel():
        return replace(earlier, finish_reason=later.finish_reason)
    assert (earlier.memory_logp is None) == (later.memory_logp is None)
    return Completion(
        tokens=torch.cat([earlier.tokens, later.tokens]),
        sampler_logp=torch.cat([earlier.sampler_logp, later.sampler_logp]),
        policy_logp=torch.cat([earlier.policy_logp, later.policy_logp]),
        memory_logp=_joined(earlier.memory_logp, later.memory_logp),
        version_spans=_spans(earlier, later),
        finish_reason=later.finish_reason,
        seed=later.seed,
        argmax_moved=_joined(earlier.argmax_moved, later.argmax_moved),
        calibration_kl=_joined(earlier.calibration_kl, later.calibration_kl),
        entropy=_joined(earlier.entropy, later.entropy),
        top_logp=_joined(earlier.top_logp, later.top_logp),
    )


def ended(response: Completion, sampling: SamplingParams) -> Completion:
    """The response, with its own end in place of an abort that came after its last token."""
    if response.finish_reason is not FinishReason.ABORT or not response.tokens.numel():
        return response
    if int(response.tokens[-1]) in sampling.stop_token_ids:
        return replace(response, finish_reason=FinishReason.STOP)
    if response.tokens.numel() >= sampling.max_tokens:
        return replace(response, finish_reason=FinishReason.LENGTH)
    return response


def _joined(earlier_T: Tensor | None, later_T: Tensor | None) -> Tensor | None:
    return None if earlier_T is None or later_T is None else torch.cat([earlier_T, later_T])


def _spans(earlier: Completion, later: Completion) -> tuple[VersionSpan, ...]:
    offset = earlier.tokens.numel()
    moved = (VersionSpan(span.version, span.start + offset, span.end + offset) for span in later.version_spans)
    spans: list[VersionSpan] = []
    for span in (*earlier.version_spans, *moved):
        if spans and spans[-1].version == span.version and spans[-1].end == span.start:
            spans[-1] = replace(spans[-1], end=span.end)
        else:
            spans.append(span)
    return tuple(spans)


def oldest_version(completions: Iterable[Completion]) -> int | None:
    """The oldest policy version that sampled a token; None where there is no token."""
    return min((span.version for completion in completions for span in completion.version_spans), default=None)


def staleness(groups: Sequence[Group]) -> dict[str, float]:
    """How many versions older than its group's policy a token is: mean and maximum over tokens; empty without any."""
    behind = [
        (group.policy_version - span.version, span.end - span.start)
        for group in groups
        for response in group.responses
        for span in response.completion.version_spans
    ]
    tokens = sum(count for _, count in behind)
    if not tokens:
        return {}
    return {
        "rollout/staleness_mean": sum(versions * count for versions, count in behind) / tokens,
        "rollout/staleness_max": float(max(versions for versions, _ in behind)),
    }
