"""A learner whose head never holds a micro-batch's logits: losses, norms, figures and weights are those with logits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from policies import LAYOUTS, learner_on, optimizer_settings, packed, ragged_sequences, recipe, save_model, settings
from policies import weights_of as all_weights
from torch import Tensor

from megasharp.common.records import StepStats
from megasharp.config.policy import HeadForm, LoraConfig
from megasharp.ops.chunked_head import chunked_token_head

WORLDS = {1: ("tp1",), 2: ("tp2", "pp2")}
MODELS = ("qwen3-tied", "qwen2")
CHUNK = 5


@dataclass(frozen=True)
class Result:
    stats: list[StepStats]
    weights: dict[str, Tensor]


def train(folder: str, layout: str, head: HeadForm, lora: LoraConfig | None = None) -> Result:
    method = recipe(("grpo", "kl"))
    batch = packed(ragged_sequences(), LAYOUTS[layout])
    values = settings(folder, LAYOUTS[layout], method.needs, optimizer_settings(eps=1e-6), head=head, lora=lora)
    with learner_on(values) as (learner, _):
        stats = [learner.step(learner.annotate(batch, method.annotation), method) for _ in range(2)]
        return Result(stats, all_weights(learner))


def both_forms(
    rank: int, world: int, folders: dict[str, str], layouts: tuple[str, ...]
) -> dict[str, tuple[Result, Result]]:
    # Micro-batches of these tests are smaller than a chunk is meant to be.
    assert chunked_token_head.__kwdefaults__ is not None
    chunked_token_head.__kwdefaults__["chunk_tokens"] = CHUNK
    found = {}
    for layout in layouts:
        for model, folder in folders.items():
            found[f"{layout} {model}"] = train(folder, layout, "logits"), train(folder, layout, "chunked")
    adapters = LoraConfig(rank=2, alpha=4.0, targets=["qkv", "fc2"])
    folder, layout = folders[MODELS[0]], layouts[0]
    found["lora"] = train(folder, layout, "logits", adapters), train(folder, layout, "chunked", adapters)
    return found


@pytest.mark.long("layouts")
@pytest.mark.parametrize("world", WORLDS)
def test_equal_to_the_form_with_logits(tmp_path: Path, world: int) -> None:
    folders = {model: save_model(tmp_path, model) for model in MODELS}
    for found in run_ranks(world, both_forms, folders, WORLDS[world]):
        assert len(found) == len(WORLDS[world]) * len(MODELS) + 1
        for logits, chunked in found.values():
            for one, other in zip(logits.stats, chunked.stats, strict=True):
                assert other.loss == pytest.approx(one.loss, rel=1e-5)
                assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
                assert other.metrics.keys() == one.metrics.keys()
                for name, metric in one.metrics.items():
                    torch.testing.assert_close(
                        torch.tensor(dataclasses.astuple(other.metrics[name]), dtype=torch.float64),
                        torch.tensor(dataclasses.astuple(metric), dtype=torch.float64),
                        rtol=1e-4,
                        atol=1e-5,
                    )
            for name, weight in logits.weights.items():
                # Where a gradient is near 0, Adam moves a weight by its rate of 1e-2 times what rounding left of it.
                torch.testing.assert_close(chunked.weights[name], weight, rtol=1e-4, atol=5e-5)
