"""The plain policy gradient: its gradient, its value, and that it is the others' on the first optimizer step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megasharp.algos.base import Needs, OldLogp
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.casp import CaSPParams
from megasharp.common.errors import UserError

NEEDS = Needs(old_logp=OldLogp.IN_LOSS)


def test_gradient_and_value_whatever_the_old_policy(make_micro, grade) -> None:
    micro = make_micro(NEEDS)
    x = micro.inputs
    loss, gradient_T, _ = grade(micro, ["grpo", "reinforce"])
    expected_T = -micro.advantage_T * x.mask_T / x.mask_T.sum()
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-12, atol=0.0)
    assert loss == pytest.approx(float((expected_T * x.logp_T).sum()), rel=1e-12)


def test_first_step_after_a_rollout_has_the_clipped_surrogates_gradient(make_micro, grade) -> None:
    micro = make_micro(NEEDS)
    micro = dataclasses.replace(micro, inputs=dataclasses.replace(micro.inputs, old_logp_T=micro.inputs.logp_T))
    _, one_T, metrics = grade(micro, ["grpo", "reinforce"])
    _, other_T, _ = grade(micro, ["grpo"])
    torch.testing.assert_close(one_T, other_T, rtol=1e-12, atol=0.0)
    assert metrics["policy/ratio"] == 1.0 and metrics["policy/kl_old"] == 0.0


def test_the_direction_of_other_methods_is_kept(make_micro, grade) -> None:
    """CaSP's smoothed gradient reaches the sampled token's log-prob as (1 - alpha) of its own."""
    casp = CaSPParams(alpha=0.25, topn=2, quantile=0.0, penalty_on="advantage", lambda_top1=1.0)
    recipe = build_recipe(["grpo", "reinforce", "casp"], {"casp": casp}, reduction=None, constant=1.0, mini_batches=1)
    micro = make_micro(recipe.needs)
    _, plain_T, _ = grade(micro, ["grpo", "reinforce"])
    _, smoothed_T, _ = grade(micro, ["grpo", "reinforce", "casp"], {"casp": casp})
    factor_T = torch.where(micro.advantage_T > 0, 0.75, 1.0)
    torch.testing.assert_close(smoothed_T, factor_T * plain_T, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("other", ["bypass", "casp"])
def test_a_changed_ratio_is_refused(other: str) -> None:
    with pytest.raises(UserError, match=f"'reinforce' and '{other}' cannot be combined: there is no ratio"):
        build_recipe(["grpo", other, "reinforce"], {}, reduction=None, constant=1.0, mini_batches=1)
