"""Masks on samples that the policy is too far from: ratio_mask and off_policy_mask by their closed forms."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import each_case

from megasharp.algos.base import Needs, OldLogp
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.off_policy_mask import OffPolicyMask, OffPolicyMaskParams
from megasharp.algos.ratio_mask import RatioMask, RatioMaskParams
from megasharp.common.errors import UserError
from megasharp.common.records import TokenInputs

RATIOS = (0.5, 1.5, 3.0, 1.0, 0.1, 0.4)


def with_ratios(make_micro) -> TokenInputs:
    """Three responses of two tokens with these ratios to the policy's record; the sampler's record is the present."""
    old_T = torch.full((6,), -1.0, dtype=torch.float64)
    return dataclasses.replace(
        make_micro(Needs(old_logp=OldLogp.IN_LOSS, sampler_logp=True, policy_logp=True)).inputs,
        seq_T=torch.tensor([0, 0, 1, 1, 2, 2]),
        mask_T=torch.ones_like(old_T),
        num_sequences=3,
        logp_T=old_T.clone(),
        old_logp_T=old_T,
        policy_logp_T=old_T - torch.tensor(RATIOS, dtype=torch.float64).log(),
        sampler_logp_T=old_T,
    )


K3_FIRST = sum(r - 1 - math.log(r) for r in RATIOS[:2])
CASES = [
    ("token", 0.45, 2.0, None, [1, 1, 0, 1, 0, 0]),
    ("sequence", 0.5, 2.0, None, [1, 1, 0, 0, 0, 0]),
    ("geometric", 0.5, 2.0, None, [1, 1, 1, 1, 0, 0]),
    ("token", 0.0, 9.0, 0.2, [1, 1, 0, 1, 0, 0]),
    ("sequence", 0.0, 9.0, 1.01 * K3_FIRST, [1, 1, 0, 0, 0, 0]),
    ("geometric", 0.0, 9.0, 0.49 * K3_FIRST, [0, 0, 0, 0, 0, 0]),
    ("geometric", 0.0, 9.0, 0.51 * K3_FIRST, [1, 1, 0, 0, 0, 0]),
]


@each_case(("level", "low", "high", "k3", "expected"), CASES)
def test_ratio_mask_keeps_what_is_within_its_bounds(make_micro, level, low, high, k3, expected) -> None:
    params = RatioMaskParams(against="policy", level=level, low=low, high=high, k3=k3)
    kept_T, metrics = RatioMask(params).correction(with_ratios(make_micro))
    assert kept_T.tolist() == expected
    assert metrics["method/ratio_mask/dropped"].value_T.tolist() == [1 - kept for kept in expected]


def test_off_policy_mask_drops_bad_responses_that_became_unlikely(make_micro) -> None:
    """Mean gaps: log(1 / 0.75) / 2 = 0.14, below 0, and log(25) / 2 = 1.6; the last response is the only one far."""
    x = with_ratios(make_micro)
    for threshold, expected in ((0.5, [1, 1, 1, 1, 0, 1]), (0.1, [0, 0, 1, 1, 0, 1]), (1.7, [1] * 6)):
        adv_T = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
        method = OffPolicyMask(OffPolicyMaskParams(against="policy", threshold=threshold))
        assert method.weight(x, adv_T, {})[0].tolist() == expected
    on_policy = OffPolicyMask(OffPolicyMaskParams(against="sampler", threshold=1e-9))
    assert on_policy.weight(x, adv_T, {})[0].tolist() == [1] * 6


@each_case("names", [["clip"], ["cispo"], ["gspo"], ["bypass"], ["truncated_is"], ["reinforce"]])
@each_case("mask", ["ratio_mask", "off_policy_mask"])
def test_masks_stand_beside_every_surrogate_and_one_correction(names, mask) -> None:
    assert mask in build_recipe(["grpo", *names, mask], {}, reduction=None, constant=1.0, mini_batches=1).methods


def test_gspo_refuses_a_mask_on_single_tokens() -> None:
    params = {"ratio_mask": RatioMaskParams(level="token")}
    with pytest.raises(UserError, match=r"'gspo' and 'ratio_mask' cannot be combined: .*recipe.ratio_mask.level"):
        build_recipe(["grpo", "gspo", "ratio_mask"], params, reduction=None, constant=1.0, mini_batches=1)


def test_bounds_that_keep_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing but equal"):
        RatioMaskParams(low=1.0, high=1.0)
