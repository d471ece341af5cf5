"""CISPO: a bounded weight on the gradient of log pi; no token loses its gradient."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megasharp.algos.base import Needs, OldLogp
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.cispo import CISPOParams
from megasharp.algos.clip import ClipParams
from megasharp.common.errors import UserError

NEEDS = Needs(old_logp=OldLogp.IN_LOSS)


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.2), (0.3, 0.1), (10.0, 0.2)])
def test_gradient_is_the_clipped_weight_times_the_advantage(make_micro, grade, low: float, high: float) -> None:
    micro = make_micro(NEEDS)
    x = micro.inputs
    loss, gradient_T, metrics = grade(micro, ["grpo", "cispo"], {"cispo": CISPOParams(low=low, high=high)})
    ratio_T = (x.logp_T - x.old_logp_T).exp()
    weight_T = torch.where(ratio_T > 1 + high, 1 + high, torch.where(ratio_T < 1 - low, 1 - low, ratio_T))
    expected_T = -weight_T * micro.advantage_T * x.mask_T / x.mask_T.sum()
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-12, atol=0.0)
    assert loss == pytest.approx(float((expected_T * x.logp_T).sum()), rel=1e-12)
    assert (gradient_T[x.mask_T > 0] != 0).all()
    kept = x.mask_T > 0
    assert metrics["policy/clip_high"] == pytest.approx(float((ratio_T[kept] > 1 + high).double().mean()))
    assert metrics["policy/clip_low"] == pytest.approx(float((ratio_T[kept] < 1 - low).double().mean()))
    assert metrics["policy/ratio"] == pytest.approx(float(ratio_T[kept].mean()))


def test_wide_bounds_have_the_unclipped_ratios_gradient(make_micro, grade) -> None:
    micro = make_micro(NEEDS)
    _, one_T, _ = grade(micro, ["grpo", "cispo"], {"cispo": CISPOParams(high=1e6)})
    _, other_T, _ = grade(micro, ["grpo"], {"clip": ClipParams(low=1.0, high=1e6)})
    torch.testing.assert_close(one_T, other_T, rtol=1e-12, atol=0.0)


def test_at_the_old_policy_it_is_reinforce(make_micro, grade) -> None:
    micro = make_micro(NEEDS)
    micro = dataclasses.replace(micro, inputs=dataclasses.replace(micro.inputs, old_logp_T=micro.inputs.logp_T))
    one, other = (grade(micro, ["grpo", name]) for name in ("cispo", "reinforce"))
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_stray_ratio_is_bounded_and_keeps_its_gradient(make_micro, grade, gap: float) -> None:
    micro = make_micro(NEEDS)
    x = dataclasses.replace(micro.inputs, old_logp_T=micro.inputs.logp_T - gap)
    _, gradient_T, _ = grade(dataclasses.replace(micro, inputs=x), ["grpo", "cispo"])
    assert gradient_T.isfinite().all() and (gradient_T[x.mask_T > 0] != 0).all()


def test_a_second_surrogate_is_refused() -> None:
    with pytest.raises(UserError, match="'clip' and 'cispo' are both the surrogate"):
        build_recipe(["grpo", "clip", "cispo"], {}, reduction=None, constant=1.0, mini_batches=1)
