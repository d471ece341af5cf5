"""Prompts without advantages are passed forward alone: loss, gradient, metrics and weights are those of all rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from policies import LAYOUTS, learner_on, optimizer_settings, packed, ragged_sequences, recipe, save_model, settings
from policies import weights_of as all_weights
from torch import Tensor

from megasharp.algos.dlc import cross_entropy_recipe
from megasharp.algos.recipe import Recipe
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import MicroBatch, Sequence, StepStats
from megasharp.learner.forward import Passes
from megasharp.learner.learner import RankLearner
from megasharp.learner.without_advantage import split

SILENT = ("group-1", "group-4")
RECIPES = {"grpo": recipe(), "kl": recipe(("grpo", "kl")), "cross-entropy": cross_entropy_recipe()}
# A layout and a recipe. A slice has the rest: another kind of ranks, and another loss of every row.
FEW = (("cp2", "grpo"), ("dp2", "grpo"), ("tp2", "cross-entropy"))
REST = (("tp2", "grpo"), ("tp2", "kl"))
Cases = tuple[tuple[str, str], ...]


def sequences() -> list[Sequence]:
    """Of six groups two without any advantage; the others' advantages are not zero."""
    return [
        dataclasses.replace(one, advantage_T=torch.zeros_like(one.advantage_T)) if one.group_id in SILENT else one
        for one in ragged_sequences()
    ]


Prediction = tuple[tuple[int, ...], int, int, float, float, float]


def predictions(micro: MicroBatch) -> dict[int, list[Prediction]]:
    """Each sequence's predictions: tokens that the row sees, its position, the target, three of the methods' inputs."""
    runs = list(zip(*(x.tolist() for x in dataclasses.astuple(micro.segments)), strict=True))
    seen: dict[int, tuple[int, ...]] = {}
    for start, length, prefix in runs:
        before = () if prefix < 0 else tuple(range(runs[prefix][0], runs[prefix][0] + runs[prefix][1]))
        for row in range(start, start + length):
            seen[row] = (*before, *range(start, row + 1))
    found: dict[int, list[Prediction]] = {number: [] for number in micro.sequence_ids}
    for token, row in enumerate(micro.rows_T.tolist()):
        x = micro.inputs
        found[micro.sequence_ids[int(x.seq_T[token])]].append(
            (
                tuple(micro.tokens_P[list(seen[row])].tolist()),
                int(micro.positions_P[row]),
                int(micro.targets_T[token]),
                float(micro.advantage_T[token]),
                float(x.mask_T[token]),
                float(x.group_T[token]),
            )
        )
    return found


def test_the_parts_predict_what_the_whole_does() -> None:
    """Contexts are read off the segments, token by token, by rules of this test."""
    ((micros,),) = [
        mini.per_rank for mini in packed(sequences(), ParallelLayout(), micro_batch_tokens=400).mini_batches
    ]
    (whole,) = micros
    trained, silent = split(whole, 16)
    assert trained is not None and silent is not None
    expected, first, second = predictions(whole), predictions(trained), predictions(silent)
    assert {**first, **second} == expected and not first.keys() & second.keys()
    assert second and all(advantage == 0 for found in second.values() for _, _, _, advantage, _, _ in found)
    for part in (trained, silent):
        assert part.tokens_P.numel() % 16 == 0 and part.inputs.num_sequences == len(part.sequence_ids)
        lengths = dict(zip(whole.sequence_ids, whole.length_S.tolist(), strict=True))
        assert part.length_S.tolist() == [lengths[number] for number in part.sequence_ids]
    assert split(trained, 16) == (trained, None) and split(silent, 16) == (None, silent)


@dataclasses.dataclass(frozen=True)
class Result:
    stats: StepStats
    weights: dict[str, Tensor]
    rows: int


def train(folder: str, layout: ParallelLayout, method: Recipe, *, all_rows: bool) -> Result:
    rows = 0

    def counted(self: Passes, micro_batches: Any, *rest: Any) -> Any:
        nonlocal rows
        rows += sum(micro.targets_T.numel() for micro in micro_batches)
        return update(self, micro_batches, *rest)

    update, without = Passes.update, RankLearner._without_backward
    batch = packed(sequences(), layout, micro_batch_tokens=48)
    values = settings(folder, layout, method.needs, optimizer_settings(eps=1e-6))
    with learner_on(values) as (learner, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Passes, "update", counted)
        patch.setattr(
            RankLearner,
            "_without_backward",
            (lambda self, micros, *rest: (micros, [])) if all_rows else without,
        )
        stats = learner.step(learner.annotate(batch, method.annotation), method)
        return Result(stats, all_weights(learner), rows)


def both(rank: int, world: int, folder: str, cases: Cases) -> dict[str, tuple[Result, Result]]:
    return {
        f"{layout} {name}": (
            train(folder, LAYOUTS[layout], RECIPES[name], all_rows=False),
            train(folder, LAYOUTS[layout], RECIPES[name], all_rows=True),
        )
        for layout, name in cases
    }


@pytest.mark.parametrize("cases", [FEW, pytest.param(REST, marks=pytest.mark.long("layouts"))], ids=["few", "rest"])
def test_a_step_is_that_of_all_rows(tmp_path: Path, cases: Cases) -> None:
    """Losses that do not depend on the advantage train on all: by their hook, or by what their gradient turns out."""
    found = run_ranks(2, both, save_model(tmp_path, "qwen3-tied", num_hidden_layers=2), cases)
    for case in found[0]:
        pairs = [ranks[case] for ranks in found]
        few, all_ = (sum(pair[i].rows for pair in pairs) for i in (0, 1))
        assert few < all_ if case.endswith("grpo") else few == all_, case
        one, other = pairs[0]
        assert one.stats.loss == pytest.approx(other.stats.loss, rel=1e-5), case
        assert one.stats.grad_norm == pytest.approx(other.stats.grad_norm, rel=1e-5), case
        assert one.stats.metrics.keys() == other.stats.metrics.keys(), case
        for name, metric in other.stats.metrics.items():
            assert one.stats.metrics[name].value == pytest.approx(metric.value, rel=1e-5, abs=1e-6), (case, name)
        for name, weight in other.weights.items():
            # Where a gradient is near 0, Adam moves a weight by its rate of 1e-2 times what rounding left of it.
            torch.testing.assert_close(one.weights[name], weight, rtol=1e-4, atol=5e-5, msg=f"{case} {name}")
