"""Only relative negatives: what is set to zero, and that denominators stay as they are; GRPO-N."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megasharp.algos.base import Needs, OldLogp, Ramp, Reduction
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.negative_only import NegativeOnly, NegativeOnlyParams

NEEDS = Needs(old_logp=OldLogp.IN_LOSS)


def test_advantages_that_are_not_negative_become_zero(make_micro) -> None:
    x = make_micro(Needs()).inputs
    adv_T = torch.tensor([-1.0, 0.0, 2.0, -0.5, 1e-300, -1e-300] + [0.3] * 8, dtype=torch.float64)
    got_T, metrics = NegativeOnly(NegativeOnlyParams()).calibrate(adv_T, x)
    assert got_T.tolist() == [-1.0, 0.0, 0.0, -0.5, 0.0, -1e-300] + [0.0] * 8
    assert metrics["method/negative_only/kept"].value_T.tolist() == [1, 0, 0, 1, 0, 1] + [0] * 8


def test_a_ramp_goes_from_all_advantages_to_the_negative_ones(make_micro) -> None:
    x = make_micro(Needs()).inputs
    adv_T = torch.tensor([-1.0, 2.0, -0.5, 0.3] + [0.0] * 10, dtype=torch.float64)
    method = NegativeOnly(NegativeOnlyParams(positive_weight=Ramp(start=1.0, end=0.0, steps=4)))
    for step, weight in ((1, 1.0), (3, 0.5), (5, 0.0), (99, 0.0)):
        got_T, _ = method.at(step).calibrate(adv_T, x)
        assert got_T.tolist() == [-1.0, 2.0 * weight, -0.5, pytest.approx(0.3 * weight)] + [0.0] * 10


@pytest.mark.parametrize("reduction", Reduction)
def test_denominators_stay(make_micro, grade, reduction: Reduction) -> None:
    """At the tokens that are kept the gradient is the same as without the method; elsewhere it is zero."""
    micro = make_micro(NEEDS)
    _, whole_T, _ = grade(micro, ["grpo"], reduction=reduction)
    _, kept_T, _ = grade(micro, ["grpo", "negative_only"], reduction=reduction)
    negative_T = micro.advantage_T < 0
    torch.testing.assert_close(kept_T[negative_T], whole_T[negative_T], rtol=1e-12, atol=0.0)
    assert (kept_T[~negative_T] == 0).all() and (kept_T != 0).any() and (whole_T[~negative_T] != 0).any()


@pytest.mark.parametrize("sign", [1.0, 0.0])
def test_step_without_a_negative_has_no_gradient(make_micro, grade, sign: float) -> None:
    """All correct among the kept, or nothing but groups of equal rewards."""
    micro = make_micro(NEEDS)
    micro = dataclasses.replace(micro, advantage_T=sign * micro.advantage_T.abs())
    loss, gradient_T, metrics = grade(micro, ["grpo", "negative_only"])
    assert loss == 0.0 and (gradient_T == 0).all() and metrics["method/negative_only/kept"] == 0.0


def test_grpo_n_is_grpo_with_it_under_the_papers_reduction(make_micro, grade) -> None:
    recipe = build_recipe(["grpo_n"], {}, reduction=None, constant=1.0, mini_batches=1)
    assert recipe.reduction is Reduction.SEQ_MEAN_TOKEN_MEAN
    micro = make_micro(NEEDS)
    one = grade(micro, ["grpo_n"], reduction=None)
    other = grade(micro, ["grpo", "negative_only"], reduction=Reduction.SEQ_MEAN_TOKEN_MEAN)
    assert one[0] == other[0] and torch.equal(one[1], other[1])
