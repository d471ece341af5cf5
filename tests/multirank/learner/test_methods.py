"""Every method with hooks around the update, on real ranks: loss, gradient and figures are one rank's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from launch import run_ranks
from policies import LAYOUTS, learner_on, optimizer_settings, packed, ragged_sequences, save_model, settings

from megasharp.algos import METHODS
from megasharp.algos.base import Method, MethodParams, Needs, overridden_hooks
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.clip_cov import ClipCovParams
from megasharp.algos.off_policy_mask import OffPolicyMaskParams
from megasharp.algos.ratio_mask import RatioMaskParams
from megasharp.algos.recipe import Recipe
from megasharp.common.records import MicroBatch, StepBatch, StepStats

MODEL, MIXTURE = "qwen3-tied", "qwen3moe"
BEFORE_PACKING = {"select", "rewards", "advantages", "turn_advantages"}
# Shares that are one token of a thousand, and wide bounds, would leave this step of some hundred tokens alone.
PARAMS: dict[str, MethodParams] = {
    "clip_cov": ClipCovParams(share=0.1, low=0.0, high=9.0),
    "ratio_mask": RatioMaskParams(high=1.0),
    "off_policy_mask": OffPolicyMaskParams(threshold=1e-4),
}
COMBINATIONS = (
    ("dapo", "iac"),
    ("grpo", "casp", "iac"),
    ("grpo", "ds", "casp"),
    ("grpo", "gspo", "negative_only"),
    ("dapo", "forking_tokens", "truncated_is", "kl", "entropy_bonus"),
)


def hooks_of(method: type[Method]) -> set[str]:
    return set(overridden_hooks(method)).union(*(hooks_of(METHODS[name]) for name in method.brings))


def cases() -> list[tuple[str, ...]]:
    """Methods that see tensors of ranks, each by itself, and combinations."""
    alone = [name for name in METHODS if hooks_of(METHODS[name]) - BEFORE_PACKING]
    return [(n,) if "advantages" in hooks_of(METHODS[n]) else ("grpo", n) for n in alone] + list(COMBINATIONS)


def recipe_of(names: tuple[str, ...]) -> Recipe:
    return build_recipe(names, PARAMS, reduction=None, constant=40.0, mini_batches=2)


def moved(batch: StepBatch) -> StepBatch:
    """Old and reference log-probs off the present ones, by each token's own uniform number: no ratio is one."""

    def changed(micro: MicroBatch) -> MicroBatch:
        x = micro.inputs
        assert x.old_logp_T is not None and x.draw_T is not None
        old_T = x.old_logp_T + 0.8 * (x.draw_T - 0.5).float()
        ref_T = None if x.ref_logp_T is None else x.ref_logp_T - 0.5 * x.draw_T.float()
        inputs = dataclasses.replace(
            x, old_logp_T=old_T, sampler_logp_T=old_T - 0.2 * (x.draw_T - 0.5).float(), ref_logp_T=ref_T
        )
        return dataclasses.replace(micro, inputs=inputs)

    minis = [
        dataclasses.replace(mini, per_rank=tuple(tuple(map(changed, rank)) for rank in mini.per_rank))
        for mini in batch.mini_batches
    ]
    return dataclasses.replace(batch, mini_batches=tuple(minis))


def steps(rank: int, world: int, folder: str, layout_name: str) -> list[StepStats]:
    """One step per case on the same weights: the learning rate is too small to move them."""
    layout, results = LAYOUTS[layout_name], []
    frozen = optimizer_settings(lr=1e-14)
    with learner_on(settings(folder, layout, Needs(ref_logp=True), frozen)) as (learner, _):
        for names in cases():
            recipe = recipe_of(names)
            needs = dataclasses.replace(recipe.annotation, old_logp=max(recipe.annotation.old_logp, 1))
            batch = packed(ragged_sequences(turns=True), layout, micro_batch_tokens=64, mini_batches=2)
            batch, calibrated = recipe.calibrate(moved(learner.annotate(batch, needs)))
            stats = learner.step(batch, recipe)
            results.append(dataclasses.replace(stats, metrics={**calibrated, **stats.metrics}))
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two layers: methods see what comes out of the last one."""
    return save_model(tmp_path_factory.mktemp("models"), MODEL, num_hidden_layers=2)


@pytest.fixture(scope="module")
def alone(folder: str) -> list[StepStats]:
    return run_ranks(1, steps, folder, "tp1")[0]


@pytest.mark.long("layouts")
def test_experts_on_two_ranks_do_not_change_a_method(tmp_path: Path) -> None:
    folder = save_model(tmp_path, MIXTURE)
    assert_same(run_ranks(2, steps, folder, "ep2")[0], run_ranks(1, steps, folder, "tp1")[0])


@pytest.mark.costly("every method with hooks around the update, once on two ranks")
@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(layout, marks=pytest.mark.long("layouts")) for layout in ("tp2", "pp2", "cp2"))]
)
def test_ranks_do_not_change_a_method(folder: str, alone: list[StepStats], layout: str) -> None:
    assert_same(run_ranks(2, steps, folder, layout)[0], alone)


def assert_same(split: list[StepStats], alone: list[StepStats]) -> None:
    for names, got, expected in zip(cases(), split, alone, strict=True):
        assert expected.grad_norm > 0, names
        assert got.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6), names
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), names
        assert got.metrics.keys() == expected.metrics.keys(), names
        for name, metric in expected.metrics.items():
            # A prompt counts as often as it is computed, which two ranks may both do.
            if not name.startswith("experts/"):
                assert got.metrics[name].value == pytest.approx(metric.value, rel=1e-5, abs=1e-6), (names, name)


def test_methods_differ_from_each_other(alone: list[StepStats]) -> None:
    """Or the cases above would prove nothing about most of them."""
    by_case = dict(zip(cases(), alone, strict=True))
    plain = by_case[("grpo", "clip")]
    same = [
        names
        for names, stats in by_case.items()
        if names != ("grpo", "clip") and stats.grad_norm == pytest.approx(plain.grad_norm, rel=1e-7)
    ]
    assert same == []
