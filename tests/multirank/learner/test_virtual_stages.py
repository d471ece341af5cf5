"""Interleaved pipeline stages (policy.vpp): one rank's training, and checkpoints that know nothing of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from policies import (
    LAYOUTS,
    learner_on,
    optimizer_settings,
    packed,
    ragged_sequences,
    recipe,
    save,
    save_model,
    settings,
    weights_of,
)
from torch import Tensor

from megasharp.common.records import StepStats
from megasharp.config.policy import LoraConfig
from megasharp.convert.lora import TARGETS

METHOD = recipe(("grpo", "kl"))
INTERLEAVED = "pp3vpp2"


@dataclass(frozen=True)
class Trained:
    """Two steps with a checkpoint between them."""

    layers: list[str]
    at_save: dict[str, Tensor]
    stats: list[StepStats]
    after: dict[str, Tensor]


def train(
    folder: str,
    layout_name: str,
    *,
    save_to: Path | None = None,
    load: Path | None = None,
    lora: LoraConfig | None = None,
) -> Trained:
    layout = LAYOUTS[layout_name]
    batch = packed(ragged_sequences(), layout, micro_batch_tokens=32)
    values = settings(
        folder, layout, METHOD.needs, optimizer_settings(eps=1e-6), offload=("weights", "gradients"), lora=lora
    )
    with learner_on(values) as (learner, own):
        layers = [f"{n}:{layer.layer_number}" for n, c in enumerate(own._chunks) for layer in c.decoder.layers]
        stats = []
        if load is None:
            stats.append(learner.step(learner.annotate(batch, METHOD.annotation), METHOD))
        else:
            own.load(load)
        if save_to is not None:
            save_to.mkdir(exist_ok=True)
            save(own, save_to)
        at_save = weights_of(learner)
        own.offload()
        own.onload()
        stats.append(learner.step(learner.annotate(batch, METHOD.annotation), METHOD))
        return Trained(layers, at_save, stats, weights_of(learner))


def train_and_save(rank: int, world: int, folder: str, layout_name: str, saved: Path, loaded: Path) -> list[Trained]:
    """Twice: from the start with a save, and on from what one rank saved."""
    return [train(folder, layout_name, save_to=saved), train(folder, layout_name, load=loaded)]


def train_and_save_alone(rank: int, world: int, folder: str, saved: Path) -> Trained:
    return train(folder, "tp1", save_to=saved)


def continued(rank: int, world: int, folder: str, saved: Path) -> Trained:
    return train(folder, "tp1", load=saved)


def train_adapters(rank: int, world: int, folder: str, layout_name: str) -> Trained:
    return train(folder, layout_name, lora=LoraConfig(rank=3, alpha=6.0, targets=list(TARGETS)))


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.long("layouts")
def test_interleaved_stages_train_save_and_load_as_one_rank_does(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3-tied", num_hidden_layers=6)
    alone = tmp_path / "alone"
    (want,) = run_ranks(1, train_and_save_alone, folder, alone)
    by_rank = run_ranks(3, train_and_save, folder, INTERLEAVED, tmp_path / "interleaved", alone)
    assert [found[0].layers for found in by_rank] == [["0:1", "1:4"], ["0:2", "1:5"], ["0:3", "1:6"]]
    fresh, resumed = by_rank[0]
    (elsewhere,) = run_ranks(1, continued, folder, tmp_path / "interleaved")
    assert_close(fresh.at_save, want.at_save)
    for got in (fresh, resumed, elsewhere):
        assert_close(got.after, want.after)
        assert got.stats[-1].loss == pytest.approx(want.stats[-1].loss, rel=1e-5)
        assert got.stats[-1].grad_norm == pytest.approx(want.stats[-1].grad_norm, rel=1e-4)
    assert any(not torch.equal(want.after[name], weight) for name, weight in want.at_save.items())


@pytest.mark.long("layouts")
def test_interleaved_stages_train_the_same_adapters(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3-tied", num_hidden_layers=6)
    (want,) = run_ranks(1, train_adapters, folder, "tp1")
    got = run_ranks(3, train_adapters, folder, INTERLEAVED)[0]
    assert_close(got.after, want.after)
    assert got.stats[-1].grad_norm == pytest.approx(want.stats[-1].grad_norm, rel=1e-4)
    moved = [name for name, weight in want.at_save.items() if not torch.equal(want.after[name], weight)]
    assert len(moved) == 7 * 6
