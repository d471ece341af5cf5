"""Entropy bonus, entropy penalty, differential entropy: signs, sizes, whose tokens, and gradients through the head."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.algos import METHODS
from megasharp.algos.base import MethodParams, Needs, Ramp
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.differential_entropy import DifferentialEntropy, DifferentialEntropyParams
from megasharp.algos.entropy_bonus import EntropyBonus, EntropyBonusParams
from megasharp.algos.entropy_penalty import EntropyPenalty, EntropyPenaltyParams

NEEDS = Needs(entropy=True, entropy_gradient=True)


def term(make_micro, method, correct_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The term per token, and its gradient by the entropies."""
    x = make_micro(NEEDS).inputs
    entropy_T = x.entropy_T.clone().requires_grad_()
    x = dataclasses.replace(x, entropy_T=entropy_T, correct_T=x.correct_T if correct_T is None else correct_T)
    loss_T, _ = method.penalty(x)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), entropy_T)
    torch.testing.assert_close(loss_T.detach(), gradient_T * entropy_T.detach(), rtol=1e-12, atol=0.0)
    return loss_T.detach(), gradient_T


def test_signs_and_sizes(make_micro) -> None:
    bonus_T, bonus_gradient_T = term(make_micro, EntropyBonus(EntropyBonusParams(coefficient=0.3)))
    penalty_T, penalty_gradient_T = term(make_micro, EntropyPenalty(EntropyPenaltyParams(coefficient=0.3)))
    assert (bonus_gradient_T == -0.3).all() and (penalty_gradient_T == 0.3).all()
    torch.testing.assert_close(bonus_T, -penalty_T, rtol=1e-12, atol=0.0)


def test_differential_is_a_bonus_on_correct_and_a_penalty_elsewhere(make_micro) -> None:
    method = DifferentialEntropy(DifferentialEntropyParams(correct=0.3, incorrect=0.2))
    correct_T = (torch.arange(14) % 3 == 0).double()
    _, gradient_T = term(make_micro, method, correct_T)
    torch.testing.assert_close(gradient_T, 0.2 - 0.5 * correct_T, rtol=1e-12, atol=0.0)


@each_case("correct", [0.0, 1.0])
def test_differential_with_one_kind_of_response_is_the_plain_method(make_micro, correct: float) -> None:
    method = DifferentialEntropy(DifferentialEntropyParams(correct=0.3, incorrect=0.2))
    alone = (
        EntropyBonus(EntropyBonusParams(coefficient=0.3))
        if correct
        else EntropyPenalty(EntropyPenaltyParams(coefficient=0.2))
    )
    got_T, _ = term(make_micro, method, torch.full((14,), correct, dtype=torch.float64))
    assert torch.equal(got_T, term(make_micro, alone)[0])


ZERO: dict[str, MethodParams] = {
    "entropy_bonus": EntropyBonusParams(coefficient=0.0),
    "entropy_penalty": EntropyPenaltyParams(coefficient=0.0),
    "differential_entropy": DifferentialEntropyParams(correct=0.0, incorrect=0.0),
}


@each_case("name", ZERO)
def test_coefficient_zero_is_the_plain_recipe(make_micro, grade, name: str) -> None:
    recipe = build_recipe(["grpo", name], {}, reduction=None, constant=1.0, mini_batches=2)
    micro = make_micro(recipe.needs)
    zero, plain, default = grade(micro, ["grpo", name], ZERO), grade(micro, ["grpo"]), grade(micro, ["grpo", name])
    assert zero[0] == pytest.approx(plain[0], abs=1e-12) and torch.equal(zero[1], plain[1])
    assert abs(default[0] - plain[0]) > 1e-5


@each_case("name", ZERO)
def test_coefficients_may_ramp_and_are_not_negative(name: str) -> None:
    keys = ZERO[name].model_dump().keys()
    ramp = Ramp(start=0.4, end=0.0, steps=2)
    method = METHODS[name](METHODS[name].Params(**dict.fromkeys(keys, ramp)))
    assert [set(method.at(step).params.model_dump().values()) for step in (1, 2, 3)] == [{0.4}, {0.2}, {0.0}]
    assert method.needs().entropy_gradient
    for key in keys:
        with pytest.raises(ValueError, match="greater than or equal to 0"):
            METHODS[name].Params(**{key: -0.1})
