"""The ratio to the sampler: as if the sampler had been the old policy."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megasharp.algos.base import Needs, OldLogp
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.casp import CaSPParams
from megasharp.algos.clip import ClipParams
from megasharp.common.errors import UserError

NEEDS = Needs(old_logp=OldLogp.IN_LOSS, sampler_logp=True)


@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
def test_it_is_the_surrogate_with_the_sampler_in_place_of_the_old_policy(make_micro, grade, surrogate: str) -> None:
    micro = make_micro(NEEDS)
    one = grade(micro, ["grpo", surrogate, "bypass"])
    swapped = dataclasses.replace(micro.inputs, old_logp_T=micro.inputs.sampler_logp_T)
    other = grade(dataclasses.replace(micro, inputs=swapped), ["grpo", surrogate])
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=1e-12, atol=1e-16)
    assert one[2] == pytest.approx(other[2], rel=1e-12)
    plain = grade(micro, ["grpo", surrogate])
    assert abs(plain[0] - one[0]) > 1e-3


def test_works_without_old_log_probs(make_micro) -> None:
    """The first optimizer step after a rollout has none of its own; nothing else of the loss changes."""
    micro = make_micro(NEEDS)
    recipe = build_recipe(["grpo", "bypass"], {}, reduction=None, constant=1.0, mini_batches=1)
    assert recipe.annotation.old_logp is OldLogp.NONE
    x = dataclasses.replace(micro.inputs, old_logp_T=None)
    got_T = recipe.methods["bypass"].log_ratio(x.logp_T - x.before_T, x, micro.advantage_T)
    torch.testing.assert_close(got_T, x.logp_T - x.sampler_logp_T, rtol=1e-12, atol=1e-15)


def test_other_changes_of_the_ratio_stay(make_micro, grade) -> None:
    """CaSP's lambda_top1 is on top of it, whichever of the two is named first."""
    casp = CaSPParams(alpha=0.0, topn=2, quantile=0.0, lambda_top1=1.5)
    params = {"casp": casp, "clip": ClipParams(low=1.0, high=1e6)}
    names = ["grpo", "bypass", "casp"]
    micro = make_micro(build_recipe(names, params, reduction=None, constant=1.0, mini_batches=2).needs)
    one, other = grade(micro, names, params), grade(micro, ["grpo", "casp", "bypass"], params)
    torch.testing.assert_close(one[1], other[1], rtol=1e-12, atol=0.0)
    x = micro.inputs
    factor_T = torch.where((micro.advantage_T < 0) & (x.is_top1_T > 0), 1.5, 1.0)
    expected_T = -micro.advantage_T * factor_T * (x.logp_T - x.sampler_logp_T).exp() * x.mask_T / x.mask_T.sum()
    torch.testing.assert_close(one[1], expected_T, rtol=1e-12, atol=1e-16)


def test_correcting_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"'bypass' and 'truncated_is' cannot be combined: .* corrected twice"):
        build_recipe(["grpo", "truncated_is", "bypass"], {}, reduction=None, constant=1.0, mini_batches=1)
