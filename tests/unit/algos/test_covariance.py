"""Clip-Cov and KL-Cov: the covariance, how many tokens are picked and which, and what becomes of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.algos.base import Needs, OldLogp, Ramp
from megasharp.algos.clip import ClipParams
from megasharp.algos.clip_cov import ClipCov, ClipCovParams
from megasharp.algos.covariance import covariance, covariance_means, share_of
from megasharp.algos.kl_cov import KLCov, KLCovParams

NEEDS = Needs(old_logp=OldLogp.BEFORE_STEP, draw=True)
WIDE = {"low": -10.0, "high": 10.0}


def many(make_micro, tokens: int = 100, masked: int = 0, seed: int = 0, dtype: torch.dtype = torch.float64):
    """One response of many tokens, the last `masked` of them masked, with random advantages."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(tokens, generator=generator, dtype=dtype)

    template = make_micro(NEEDS)
    inputs = dataclasses.replace(
        template.inputs,
        **dict.fromkeys(("group_T", "reward_T", "correct_T", "group_size_T", "group_correct_T"), torch.zeros(tokens)),
        seq_T=torch.zeros(tokens, dtype=torch.int64),
        num_sequences=1,
        mask_T=(torch.arange(tokens) < tokens - masked).to(dtype),
        logp_T=normal() - 3.0,
        old_logp_T=normal() - 3.0,
        draw_T=torch.rand(tokens, generator=generator, dtype=torch.float64),
        entropy_T=None,
    )
    length_S = torch.tensor([float(tokens - masked)], dtype=torch.float64)
    return dataclasses.replace(template, inputs=inputs, length_S=length_S, advantage_T=normal().double())


def numpy_covariance(micro) -> np.ndarray:
    """Over unmasked tokens, NaN elsewhere."""
    kept = micro.inputs.mask_T.numpy() > 0
    adv, logp = micro.advantage_T.numpy(), micro.inputs.old_logp_T.double().numpy()
    cov = (adv - adv[kept].mean()) * (logp - logp[kept].mean())
    return np.where(kept, cov, np.nan)


def clipped(method: ClipCov, micro) -> Tensor:
    stats = method.prepare(micro.advantage_T, micro.inputs)
    weight_T, _ = method.weight(micro.inputs, micro.advantage_T.to(micro.inputs.mask_T.dtype), stats)
    assert ((weight_T == 0) | (weight_T == 1)).all()
    return weight_T == 0


def penalised(method: KLCov, micro) -> Tensor:
    stats = method.prepare(micro.advantage_T, micro.inputs)
    adv_T = micro.advantage_T.to(micro.inputs.mask_T.dtype)
    _, metrics = method.surrogate(micro.inputs, torch.zeros_like(adv_T), adv_T, stats)
    return metrics["method/kl_cov/penalised"].value_T > 0


def test_covariance_is_numpys(make_micro) -> None:
    micro = many(make_micro, masked=17)
    means = covariance_means(micro.advantage_T, micro.inputs)
    got = covariance(micro.advantage_T, micro.inputs, means).numpy()
    expected = numpy_covariance(micro)
    np.testing.assert_allclose(got[:83], expected[:83], rtol=1e-12)
    adv, logp = micro.advantage_T[:83].numpy(), micro.inputs.old_logp_T[:83].numpy()
    assert np.nanmean(expected) == pytest.approx(np.cov(adv, logp, bias=True)[0, 1], rel=1e-12)


def test_share_is_exact_and_at_least_one(make_micro) -> None:
    x = many(make_micro).inputs
    assert [share_of(x, share) for share in (0.29, 0.5, 0.299, 0.001, 1.0)] == [29, 50, 29, 1, 100]


@each_case("dtype", [torch.float64, torch.float32])
@each_case("share", [0.001, 0.03, 0.29])
def test_kl_cov_takes_the_top(make_micro, share: float, dtype: torch.dtype) -> None:
    micro = many(make_micro, masked=20, dtype=dtype)
    chosen_T = penalised(KLCov(KLCovParams(share=share)), micro)
    count = max(int(share * 80), 1)
    order = np.argsort(-np.nan_to_num(numpy_covariance(micro), nan=-np.inf), kind="stable")
    assert set(np.flatnonzero(chosen_T.numpy())) == set(order[:count])


def test_kl_cov_breaks_ties_by_the_draw(make_micro) -> None:
    """All advantages equal: every covariance is 0, and the share is still exact."""
    micro = many(make_micro, masked=20)
    micro = dataclasses.replace(micro, advantage_T=torch.full((100,), 0.75, dtype=torch.float64))
    chosen_T = penalised(KLCov(KLCovParams(share=0.1)), micro)
    assert set(chosen_T.nonzero().flatten().tolist()) == set(micro.inputs.draw_T[:80].argsort()[:8].tolist())


def test_kl_cov_loss_and_gradient(make_micro, grade) -> None:
    micro = many(make_micro)
    x = micro.inputs
    params = {"kl_cov": KLCovParams(share=0.2, coefficient=0.7)}
    loss, gradient_T, metrics = grade(micro, ["grpo", "kl_cov"], params)
    logr_T = x.logp_T - x.old_logp_T
    chosen_T = penalised(KLCov(KLCovParams(share=0.2)), micro).double()
    loss_T = -micro.advantage_T * logr_T.exp() + 0.7 * chosen_T * logr_T.abs()
    assert loss == pytest.approx(float(loss_T.mean()), rel=1e-12)
    expected_T = (-micro.advantage_T * logr_T.exp() + 0.7 * chosen_T * logr_T.sign()) / 100
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-12, atol=1e-15)
    assert metrics["method/kl_cov/penalised"] == pytest.approx(0.2)


def test_kl_cov_without_coefficient_is_the_unclipped_ratio(make_micro, grade) -> None:
    micro = many(make_micro)
    one = grade(micro, ["grpo", "kl_cov"], {"kl_cov": KLCovParams(share=0.5, coefficient=0.0)})
    other = grade(micro, ["grpo"], {"clip": ClipParams(low=1.0, high=1e9)})
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=1e-12, atol=1e-15)


def test_kl_cov_has_no_effect_at_the_old_policy(make_micro, grade) -> None:
    micro = many(make_micro)
    micro = dataclasses.replace(micro, inputs=dataclasses.replace(micro.inputs, old_logp_T=micro.inputs.logp_T))
    with_T, without_T = (
        grade(micro, ["grpo", "kl_cov"], {"kl_cov": KLCovParams(share=0.5, coefficient=c)})[1] for c in (3.0, 0.0)
    )
    torch.testing.assert_close(with_T, without_T, rtol=1e-12, atol=0.0)


def test_kl_cov_coefficient_may_ramp() -> None:
    ramp = KLCov(KLCovParams(coefficient=Ramp(start=2.0, end=0.0, steps=4)))
    assert [ramp.at(step).params.coefficient for step in (1, 3, 9)] == [2.0, 1.0, 0.0]


@each_case("dtype", [torch.float64, torch.float32])
@each_case(("low", "high", "share"), [(0.5, 5.0, 0.05), (-10.0, 10.0, 0.29), (1.0, 5.0, 0.001)])
def test_clip_cov_takes_the_smallest_draws_between_the_bounds(
    make_micro, low: float, high: float, share: float, dtype: torch.dtype
) -> None:
    micro = many(make_micro, masked=20, dtype=dtype)
    chosen_T = clipped(ClipCov(ClipCovParams(share=share, low=low, high=high)), micro)
    cov = numpy_covariance(micro)
    candidates = np.flatnonzero((cov > low) & (cov < high))
    count = max(int(share * 80), 1)
    assert len(candidates) > count
    expected = candidates[np.argsort(micro.inputs.draw_T.numpy()[candidates])[:count]]
    assert set(np.flatnonzero(chosen_T.numpy())) == set(expected)


def test_clip_cov_takes_all_where_there_are_fewer(make_micro) -> None:
    micro = many(make_micro)
    low = float(np.sort(numpy_covariance(micro))[-4:-2].mean())
    chosen_T = clipped(ClipCov(ClipCovParams(share=0.5, low=low, high=1e9)), micro)
    assert int(chosen_T.sum()) == 3


def test_clip_cov_without_candidates_is_its_clip_alone(make_micro, grade) -> None:
    micro = many(make_micro)
    clip = {"clip": ClipParams(low=1.0, high=1.0)}
    one = grade(micro, ["grpo", "clip_cov"], {"clip_cov": ClipCovParams(low=1e6, high=1e7)})
    other = grade(micro, ["grpo"], clip)
    assert one[0] == other[0] and torch.equal(one[1], other[1]) and one[2]["policy/clip_cov"] == 0.0


def test_clip_cov_leaves_out_tokens_and_keeps_denominators(make_micro, grade) -> None:
    micro = many(make_micro)
    params = ClipCovParams(share=0.1, **WIDE)
    _, gradient_T, metrics = grade(micro, ["grpo", "clip_cov"], {"clip_cov": params})
    _, whole_T, _ = grade(micro, ["grpo"], {"clip": ClipParams(low=1.0, high=1.0)})
    chosen_T = clipped(ClipCov(params), micro)
    torch.testing.assert_close(gradient_T, torch.where(chosen_T, 0.0, whole_T), rtol=1e-12, atol=0.0)
    assert int(chosen_T.sum()) == 10 and metrics["policy/clip_cov"] == pytest.approx(0.1)


def test_choice_differs_with_the_draws_and_is_spread(make_micro) -> None:
    """Over many draws every candidate is picked about equally often."""
    micro = many(make_micro, tokens=20)
    counts = torch.zeros(20)
    for seed in range(400):
        draw_T = torch.rand(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        drawn = dataclasses.replace(micro, inputs=dataclasses.replace(micro.inputs, draw_T=draw_T))
        counts += clipped(ClipCov(ClipCovParams(share=0.25, **WIDE)), drawn)
    assert counts.sum() == 400 * 5 and counts.min() > 60 and counts.max() < 140


def test_bounds_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(ValueError, match="must be below"):
        ClipCovParams(low=5.0, high=1.0)
