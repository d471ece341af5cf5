"""What may be switched on together is: layouts with context and pipeline ranks, adapters, overlap, the chunked head.

Each case alone has tests beside this one. Here several at once train, are saved, loaded, moved to the host and back,
and train on; steps and weights are those of one rank with none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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

from megasharp.common.layout import ParallelLayout
from megasharp.config.policy import LoraConfig
from megasharp.convert.lora import TARGETS

MINI_BATCHES = 2
METHOD = recipe(("grpo", "kl"), MINI_BATCHES)
ADAPTERS = LoraConfig(rank=3, alpha=6.0, targets=list(TARGETS))
# A bucket holds about one layer, so that there is something to overlap.
OVERLAP = {"overlap": True, "megatron": {"bucket_size": 3000}}
EVERYWHERE = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Case:
    """Ranks, and what is other than a plain learner's; adapters are one rank's too."""

    name: str
    layout: ParallelLayout
    changes: dict[str, Any] = field(default_factory=dict)
    lora: LoraConfig | None = None


CASES = (
    Case("cp2, adapters", LAYOUTS["cp2"], {"recompute": "full", "head": "chunked", "offload": EVERYWHERE}, ADAPTERS),
    Case("tp2cp2, adapters", LAYOUTS["tp2cp2"], {"recompute": "selective", "head": "chunked"}, ADAPTERS),
    Case("pp2cp2, overlap", LAYOUTS["pp2cp2"], {"head": "chunked", "offload": EVERYWHERE, **OVERLAP}),
    Case("tp2dp2, overlap", LAYOUTS["tp2dp2"], {"recompute": "full", **OVERLAP}),
    Case("pp2dp2, overlap", ParallelLayout(pp=2, dp=2), OVERLAP),
    Case("pp3vpp2cp2, overlap", replace(LAYOUTS["pp3vpp2"], cp=2), {"head": "chunked", **OVERLAP}),
)


EXPERT_ADAPTERS = LoraConfig(rank=3, alpha=6.0, targets=["qkv", "proj"])
# Of a mixture of experts.
EXPERT_CASES = (
    Case("ep2, offload", LAYOUTS["ep2"], {"recompute": "full", "head": "chunked", "offload": EVERYWHERE}),
    Case("ep2, optimizer offload", LAYOUTS["ep2"], {"optimizer_offload": True, **OVERLAP}),
    Case("tp2ep2, allgather", LAYOUTS["tp2ep2"], {"recompute": "selective", "experts": {"dispatcher": "allgather"}}),
    Case("tp2etp2, overlap", LAYOUTS["tp2etp2"], OVERLAP),
    Case("ep2, adapters", LAYOUTS["ep2"], {"recompute": "full"}, EXPERT_ADAPTERS),
    Case("pp2ep2, adapters", LAYOUTS["pp2ep2"], {}, EXPERT_ADAPTERS),
    Case("ep2etp2", LAYOUTS["ep2etp2"], {"recompute": "selective", "offload": EVERYWHERE}),
    Case("pp3vpp2, ep2", replace(LAYOUTS["pp3vpp2"], dp=2, ep=2), OVERLAP),
)


@dataclass(frozen=True)
class Trained:
    """Loss and norm of two steps, and the weights after them."""

    figures: list[tuple[float, float]]
    weights: dict[str, Tensor]


def train(rank: int, world: int, folder: str, root: Path, cases: list[Case]) -> list[Trained]:
    return [trained(folder, root / f"{number} of {world}", case) for number, case in enumerate(cases)]


def trained(folder: str, saved: Path, case: Case) -> Trained:
    optimizer = optimizer_settings(eps=1e-6)
    changes = {"lora": case.lora, "diagnostics": None, **case.changes}
    values = settings(folder, case.layout, METHOD.needs, optimizer, **changes)
    batch = packed(ragged_sequences(), case.layout, micro_batch_tokens=32, mini_batches=MINI_BATCHES)
    if dist.get_rank() == 0:
        saved.mkdir()
    dist.barrier()
    with learner_on(values) as (learner, _):
        stats = [learner.step(learner.annotate(batch, METHOD.annotation), METHOD)]
        save(learner, saved)
    with learner_on(values) as (learner, own):
        learner.load(saved)
        own.offload()
        own.onload()
        stats.append(learner.step(learner.annotate(batch, METHOD.annotation), METHOD))
        return Trained([(s.loss, s.grad_norm) for s in stats], weights_of(learner))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("models"), "qwen3-tied", num_hidden_layers=6)


@pytest.fixture(scope="module")
def alone(folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[LoraConfig | None, Trained]:
    cases = [Case("plain", LAYOUTS["tp1"], lora=lora) for lora in (None, ADAPTERS)]
    results = run_ranks(1, train, folder, tmp_path_factory.mktemp("alone"), cases)[0]
    return {case.lora: result for case, result in zip(cases, results, strict=True)}


@pytest.mark.long("layouts")
@pytest.mark.parametrize("world", sorted({case.layout.world for case in CASES}))
def test_together_they_are_one_rank_without(
    folder: str, alone: dict[LoraConfig | None, Trained], world: int, tmp_path: Path
) -> None:
    assert_same_as_alone(folder, [case for case in CASES if case.layout.world == world], alone, tmp_path)


@pytest.mark.long("layouts")
@pytest.mark.parametrize("world", sorted({case.layout.world for case in EXPERT_CASES}))
def test_experts_on_ranks_are_one_rank_without(tmp_path: Path, world: int) -> None:
    folder = save_model(tmp_path, "qwen3moe", num_hidden_layers=6)
    (tmp_path / "alone").mkdir()
    plain = [Case("plain", LAYOUTS["tp1"], lora=lora) for lora in (None, EXPERT_ADAPTERS)]
    results = run_ranks(1, train, folder, tmp_path / "alone", plain)[0]
    alone = {case.lora: result for case, result in zip(plain, results, strict=True)}
    assert_same_as_alone(folder, [case for case in EXPERT_CASES if case.layout.world == world], alone, tmp_path)


def assert_same_as_alone(
    folder: str, cases: list[Case], alone: dict[LoraConfig | None, Trained], tmp_path: Path
) -> None:
    world = cases[0].layout.world
    for case, got in zip(cases, run_ranks(world, train, folder, tmp_path, cases)[0], strict=True):
        want = alone[case.lora]
        for figures, expected in zip(got.figures, want.figures, strict=True):
            assert figures == pytest.approx(expected, rel=1e-4), case.name
        assert got.weights.keys() == want.weights.keys()
        for name, weight in want.weights.items():
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-4, atol=1e-4, msg=f"{case.name}: {name}")
