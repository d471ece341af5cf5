"""The correction for a sampler that is not the policy: weights by level and mode, and what they mend in expectation."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.algos.base import Needs, OldLogp
from megasharp.algos.truncated_is import TruncatedIS, TruncatedISParams
from megasharp.common.records import TokenInputs

NEEDS = Needs(old_logp=OldLogp.IN_LOSS, sampler_logp=True)


def weights(x: TokenInputs, **params) -> tuple[Tensor, dict]:
    return TruncatedIS(TruncatedISParams(**params)).correction(x)


def with_ratios(make_micro, ratio_T: Tensor) -> TokenInputs:
    """Three responses of two tokens, all unmasked, with these ratios of the old policy to the sampler."""
    x = make_micro(NEEDS).inputs
    seq_T = torch.tensor([0, 0, 1, 1, 2, 2])
    old_T = torch.full((6,), -1.0, dtype=torch.float64)
    return dataclasses.replace(
        x,
        seq_T=seq_T,
        mask_T=torch.ones_like(old_T),
        num_sequences=3,
        old_logp_T=old_T,
        sampler_logp_T=old_T - ratio_T.log(),
    )


RATIOS = torch.tensor([0.5, 1.5, 3.0, 1.0, 0.1, 0.4], dtype=torch.float64)
ROOT = [math.sqrt(r) for r in (0.75, 3.0, 0.04)]
CASES = [
    ("token", "truncate", 0.0, 2.0, [0.5, 1.5, 2.0, 1.0, 0.1, 0.4]),
    ("token", "mask", 0.0, 2.0, [0.5, 1.5, 0.0, 1.0, 0.1, 0.4]),
    ("token", "truncate", 0.3, 1.2, [0.5, 1.2, 1.2, 1.0, 0.3, 0.4]),
    ("token", "mask", 0.3, 1.2, [0.5, 0.0, 0.0, 1.0, 0.0, 0.4]),
    ("sequence", "truncate", 0.0, 2.0, [0.75, 0.75, 2.0, 2.0, 0.04, 0.04]),
    ("sequence", "mask", 0.05, 2.0, [0.75, 0.75, 0.0, 0.0, 0.0, 0.0]),
    ("geometric", "truncate", 0.5, 2.0, [ROOT[0]] * 2 + [ROOT[1]] * 2 + [0.5] * 2),
    ("geometric", "mask", 0.5, 2.0, [ROOT[0]] * 2 + [ROOT[1]] * 2 + [0.0] * 2),
]


@each_case(("level", "mode", "low", "high", "expected"), CASES)
def test_weights(make_micro, level: str, mode: str, low: float, high: float, expected: list[float]) -> None:
    x = with_ratios(make_micro, RATIOS)
    weight_T, metrics = weights(x, level=level, mode=mode, low=low, high=high)
    torch.testing.assert_close(weight_T, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0.0)
    assert torch.equal(metrics["method/truncated_is/weight"].value_T, weight_T)
    torch.testing.assert_close(metrics["method/truncated_is/weight_squared"].value_T, weight_T**2)
    raw, _ = weights(x, level=level, low=0.0, high=1e9)
    outside = (raw < low) | (raw > high)
    assert torch.equal(metrics["method/truncated_is/outside"].value_T, outside.double()) and outside.any()


@each_case("level", ["sequence", "geometric"])
def test_masked_tokens_do_not_count_in_a_response(make_micro, level: str) -> None:
    x = with_ratios(make_micro, RATIOS)
    masked = dataclasses.replace(x, mask_T=torch.tensor([1.0, 0.0] * 3, dtype=torch.float64))
    weight_T, _ = weights(masked, level=level, high=10.0)
    torch.testing.assert_close(weight_T[::2], RATIOS[::2], rtol=1e-12, atol=0.0)


@each_case("level", ["token", "sequence", "geometric"])
@each_case("mode", ["truncate", "mask"])
def test_sampler_that_is_the_policy_changes_nothing(make_micro, grade, level: str, mode: str) -> None:
    micro = make_micro(NEEDS)
    same = dataclasses.replace(micro.inputs, sampler_logp_T=micro.inputs.old_logp_T)
    micro = dataclasses.replace(micro, inputs=same)
    params = {"truncated_is": TruncatedISParams(level=level, mode=mode)}
    one, other = grade(micro, ["grpo", "truncated_is"], params), grade(micro, ["grpo"])
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=1e-12, atol=0.0)
    assert one[2]["method/truncated_is/weight"] == pytest.approx(1.0, rel=1e-12)


def test_mean_over_the_sampler_is_the_policys_own(make_micro) -> None:
    """Enumerated over two-token responses of three tokens each: E_sampler[w f] = E_policy[f], w per response."""
    generator = torch.Generator().manual_seed(0)
    policy_NV, sampler_NV = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64).log_softmax(-1)
    first, second = (grid.flatten() for grid in torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"))
    old_T = torch.stack([policy_NV[0][first], policy_NV[1][second]], 1).flatten()
    sampler_T = torch.stack([sampler_NV[0][first], sampler_NV[1][second]], 1).flatten()
    x = dataclasses.replace(
        make_micro(NEEDS).inputs,
        seq_T=torch.arange(9).repeat_interleave(2),
        num_sequences=9,
        mask_T=torch.ones(18, dtype=torch.float64),
        old_logp_T=old_T,
        sampler_logp_T=sampler_T,
    )
    weight_T, _ = weights(x, level="sequence", high=1e6)
    f = torch.randn(9, generator=generator, dtype=torch.float64)
    probability = sampler_T.view(9, 2).sum(1).exp()
    expected = float((old_T.view(9, 2).sum(1).exp() * f).sum())
    assert float((probability * weight_T[::2] * f).sum()) == pytest.approx(expected, rel=1e-12)


@each_case("gap", [1e5, -1e5])
def test_stray_difference_is_bounded(make_micro, gap: float) -> None:
    x = make_micro(NEEDS).inputs
    x = dataclasses.replace(x, sampler_logp_T=x.old_logp_T - gap)
    for level in ("token", "sequence", "geometric"):
        assert weights(x, level=level, high=1e12)[0].isfinite().all()


def test_bounds_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be above"):
        TruncatedISParams(low=2.0, high=1.0)
