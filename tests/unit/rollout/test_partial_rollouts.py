"""Joining the parts of a response, and how old its tokens are."""

from __future__ import annotations

from dataclasses import replace

import torch

from megasharp.common.records import (
    Completion,
    FinishReason,
    Group,
    Outcome,
    Prompt,
    Response,
    SamplingParams,
    TaskAnswer,
    Verdict,
    VersionSpan,
)
from megasharp.rollout.in_flight import ended, join, oldest_version, staleness


def part(first: int, versions: list[int], reason: FinishReason, memory: bool = False) -> Completion:
    count = len(versions)
    values = torch.arange(first, first + count, dtype=torch.float32)
    return Completion(
        tokens=torch.arange(first, first + count),
        sampler_logp=-values,
        policy_logp=-2 * values,
        memory_logp=-3 * values if memory else None,
        version_spans=tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions)),
        finish_reason=reason,
        seed=7,
        argmax_moved=values > 2 if memory else None,
        calibration_kl=values / 8 if memory else None,
        entropy=values / 4 if memory else None,
        top_logp=torch.stack([-values, -values - 1], dim=1) if memory else None,
    )


def test_two_parts_become_one_response() -> None:
    joined = join(part(0, [4, 4], FinishReason.ABORT, True), part(2, [4, 5, 5], FinishReason.STOP, True))
    assert joined.tokens.tolist() == [0, 1, 2, 3, 4]
    assert joined.sampler_logp.tolist() == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert joined.policy_logp.tolist() == [0.0, -2.0, -4.0, -6.0, -8.0]
    assert joined.memory_logp is not None and joined.memory_logp.tolist() == [0.0, -3.0, -6.0, -9.0, -12.0]
    assert joined.argmax_moved is not None and joined.argmax_moved.tolist() == [False, False, False, True, True]
    assert joined.calibration_kl is not None and joined.calibration_kl.tolist() == [0, 0.125, 0.25, 0.375, 0.5]
    assert joined.entropy is not None and joined.entropy.tolist() == [0, 0.25, 0.5, 0.75, 1.0]
    assert joined.top_logp is not None and joined.top_logp[:, 1].tolist() == [-1, -2, -3, -4, -5]
    assert joined.version_spans == (VersionSpan(4, 0, 3), VersionSpan(5, 3, 5))
    assert (joined.finish_reason, joined.seed) == (FinishReason.STOP, 7)


def experts(first: int, count: int, layers: int = 2) -> torch.Tensor:
    """[count, layers, 3], which tell by whom and where they were recorded."""
    return torch.arange(first, first + count * layers * 3, dtype=torch.uint8).reshape(count, layers, 3)


def test_tokens_that_were_read_before_keep_their_experts() -> None:
    """Of a prompt of 3 tokens: both parts count from its first one, and the last token of `earlier` was not read."""
    earlier = replace(part(0, [4, 4], FinishReason.ABORT), experts=experts(0, 3 + 2 - 1))
    later = replace(part(2, [5, 5, 5], FinishReason.STOP), experts=experts(100, 3 + 5 - 1))
    joined = join(earlier, later).experts
    assert earlier.experts is not None and later.experts is not None and joined is not None
    assert torch.equal(joined, torch.cat([earlier.experts, later.experts[4:]]))
    assert join(replace(earlier, experts=None), later).experts is join(earlier, replace(later, experts=None)).experts
    nothing = Completion.unsampled(7, SamplingParams(max_tokens=4))
    assert join(nothing, later).experts is later.experts and join(earlier, nothing).experts is earlier.experts


def test_an_answer_of_an_environment_has_experts_once_the_policy_goes_on() -> None:
    unread = torch.empty(0, dtype=torch.uint8)
    earlier = replace(part(0, [4, 4], FinishReason.STOP), experts=experts(0, 4))
    answer = replace(part(2, [0, 0], FinishReason.STOP), experts=unread)
    later = replace(part(4, [4], FinishReason.STOP), experts=experts(100, 7))
    assert later.experts is not None and earlier.experts is not None
    whole = join(join(earlier, answer), later).experts
    assert whole is not None and torch.equal(whole, torch.cat([earlier.experts, later.experts[4:]]))
    # A response that goes on after a stop begins with the answer.
    assert join(answer, later).experts is later.experts
    assert join(join(replace(earlier, experts=None), answer), later).experts is None


def test_a_version_that_comes_back_is_a_span_of_its_own() -> None:
    joined = join(part(0, [5], FinishReason.ABORT), part(1, [4], FinishReason.ABORT))
    assert join(joined, part(2, [5], FinishReason.STOP)).version_spans == (
        VersionSpan(5, 0, 1),
        VersionSpan(4, 1, 2),
        VersionSpan(5, 2, 3),
    )


def test_parts_without_tokens() -> None:
    nothing = Completion.unsampled(7, SamplingParams(max_tokens=4))
    begun = part(0, [1, 1], FinishReason.LENGTH)
    assert join(nothing, begun) is begun
    ended = join(begun, nothing)
    assert ended.finish_reason is FinishReason.ABORT
    assert ended.tokens is begun.tokens and ended.version_spans == begun.version_spans


def test_an_abort_after_the_last_token_is_no_abort() -> None:
    """SGLang does not look at the token that it samples while it ends a request."""
    sampling = SamplingParams(max_tokens=4, stop_token_ids=(2,))

    def reason(length: int, given: FinishReason = FinishReason.ABORT) -> FinishReason:
        return ended(part(0, [1] * length, given), sampling).finish_reason

    assert reason(3) is FinishReason.STOP, "its last token is 2"
    assert reason(4) is FinishReason.LENGTH
    assert reason(2) is reason(0) is FinishReason.ABORT
    assert reason(2, FinishReason.LENGTH) is FinishReason.LENGTH


def test_what_was_not_sampled_has_the_memorys_fields_where_one_was_asked_for() -> None:
    without = Completion.unsampled(3, SamplingParams(max_tokens=4))
    assert (without.memory_logp, without.argmax_moved, without.calibration_kl) == (None, None, None)
    beside = Completion.unsampled(3, SamplingParams(max_tokens=4, memory_mu=0.0))
    assert all(t is not None and t.numel() == 0 for t in (beside.memory_logp, beside.argmax_moved))


def test_oldest_version() -> None:
    parts = [part(0, [3, 5], FinishReason.STOP), part(0, [4], FinishReason.STOP)]
    assert oldest_version(parts) == 3
    assert oldest_version([part(0, [], FinishReason.ABORT)]) is None


def test_staleness_is_by_token() -> None:
    prompt = Prompt("p", "t", "", (1,), TaskAnswer(), "s", 0, 0)
    versions = [[6, 6, 7], [5]]
    responses = tuple(Response(part(0, v, FinishReason.STOP), "", Verdict(Outcome.WRONG, 0.0)) for v in versions)
    assert staleness([Group("g", prompt, responses, 7)]) == {
        "rollout/staleness_mean": (1 + 1 + 0 + 2) / 4,
        "rollout/staleness_max": 2.0,
    }
    assert staleness([]) == {}
