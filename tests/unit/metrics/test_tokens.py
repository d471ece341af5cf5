"""Figures of tokens against loops over responses, and that micro-batches' figures add up to the step's."""

from __future__ import annotations

import dataclasses
import statistics
from itertools import chain

import pytest
import torch

from megasharp.algos.base import gated
from megasharp.common.records import TokenInputs
from megasharp.metrics.group_metrics import token_metrics

LENGTHS = (4, 1, 6, 3)


def inputs(seed: int) -> TokenInputs:
    """Four responses; one token of the third is masked, and the fourth is masked whole, with NaN in it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(LENGTHS)
    seq_T = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    mask_T = (seq_T != 3).double()
    mask_T[6] = 0.0

    def values(*shape: int) -> torch.Tensor:
        filled = -torch.rand(tokens, *shape, generator=generator, dtype=torch.float64) - 0.1
        filled[seq_T == 3] = float("nan")
        return filled

    zeros_T = torch.zeros(tokens, dtype=torch.float64)
    return TokenInputs(
        mask_T=mask_T,
        seq_T=seq_T,
        group_T=seq_T // 2,
        reward_T=zeros_T,
        correct_T=(seq_T == 0).double(),
        group_size_T=zeros_T,
        group_correct_T=zeros_T,
        num_sequences=4,
        logp_T=values(),
        sampler_logp_T=values(),
        policy_logp_T=values(),
        entropy_T=values().abs(),
        topn_logp_TN=values(2),
        is_top1_T=(torch.arange(tokens) % 3 == 0).double(),
    )


def by_response(x: TokenInputs, values_T: torch.Tensor) -> list[list[float]]:
    kept = [[float(v) for v, s, m in zip(values_T, x.seq_T, x.mask_T, strict=True) if s == i and m] for i in range(4)]
    return [values for values in kept if values]


def response_mean(x: TokenInputs, values_T: torch.Tensor) -> float:
    return statistics.fmean(statistics.fmean(values) for values in by_response(x, values_T))


def pooled(x: TokenInputs, values_T: torch.Tensor) -> float:
    return statistics.fmean(value for values in by_response(x, values_T) for value in values)


def test_against_loops() -> None:
    x = inputs(0)
    got = {name: metric.value for name, metric in token_metrics(x, 2).items()}
    assert got == pytest.approx(
        {
            "entropy/policy": pooled(x, x.entropy_T),
            "entropy/response_mean": response_mean(x, x.entropy_T),
            "entropy/correct": statistics.fmean(by_response(x, x.entropy_T)[0]),
            "entropy/incorrect": statistics.fmean(chain(*by_response(x, x.entropy_T)[1:])),
            "policy/sampler_gap": pooled(x, (x.logp_T - x.sampler_logp_T).abs()),
            "policy/engine_gap": pooled(x, (x.logp_T - x.policy_logp_T).abs()),
            "policy/engine_gap_max": max(chain(*by_response(x, (x.logp_T - x.policy_logp_T).abs()))),
            "candidates/lambda_1": response_mean(x, x.topn_logp_TN[:, 0]),
            "candidates/lambda_2": response_mean(x, x.topn_logp_TN[:, 1]),
            "candidates/lambda_sample": response_mean(x, x.logp_T),
            "candidates/top1_rate": pooled(x, x.is_top1_T),
        },
        rel=1e-12,
    )


def test_the_engines_gap_is_to_the_policy_before_the_update() -> None:
    x = inputs(0)
    x = dataclasses.replace(x, old_logp_T=x.policy_logp_T - 0.25)
    assert token_metrics(x, 1)["policy/engine_gap"].value == pytest.approx(0.25, rel=1e-12)


def test_micro_batches_add_up() -> None:
    """Responses weigh alike wherever they were packed."""
    first, second = inputs(1), inputs(2)
    both = {n: metric + token_metrics(second, 1)[n] for n, metric in token_metrics(first, 1).items()}
    expected = (response_mean(first, first.entropy_T) * 3 + response_mean(second, second.entropy_T) * 3) / 6
    assert both["entropy/response_mean"].value == pytest.approx(expected, rel=1e-12)


def test_a_micro_batch_without_tokens_weighs_nothing() -> None:
    x = inputs(0)
    empty = {
        field.name: value[:0]
        for field in dataclasses.fields(x)
        if isinstance(value := getattr(x, field.name), torch.Tensor)
    }
    metrics = token_metrics(dataclasses.replace(x, **empty, num_sequences=0), 2)
    assert all(metric.weight == 0 and metric.total == 0 for metric in metrics.values())


def test_gated_positions_are_those_above_their_responses_own_quantile() -> None:
    entropy_T = torch.tensor([1.0, 2, 3, 4, 9, 5, 99, 1, 2, 3, 4, 5, 6, 7], dtype=torch.float64)
    x = dataclasses.replace(inputs(3), entropy_T=entropy_T)
    # Response 0: quantile 3.4, so only 4. One token alone is never above itself. Response 2 without its masked 99.
    assert gated(x, 0.8).nonzero()[:, 0].tolist() == [3, 5]
    assert torch.equal(gated(x, 0.0), x.mask_T > 0)
    assert not gated(x, 1.0).any()
