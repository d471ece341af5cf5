"""Communication that overlaps computation changes no number: losses, norms, weights, checkpoints, the reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from policies import (
    LAYOUTS,
    changed,
    learner_on,
    packed,
    ragged_sequences,
    recipe,
    save,
    save_model,
    settings,
    weights_of,
)
from torch import Tensor

from megasharp.algos.base import Needs, OldLogp
from megasharp.config.policy import LoraConfig
from megasharp.learner.learner import LearnerSettings, RankLearner

NEEDS = Needs(old_logp=OldLogp.BEFORE_STEP, ref_logp=True)
MINI_BATCHES = 2
# A bucket holds about one layer of the tiny models, so that there are several to exchange.
BUCKETS = {"bucket_size": 3000}


@dataclass
class Seen:
    """One rank's run: figures of the steps, the weights after them and after a resume, buckets, early gathers."""

    figures: list[tuple[float, float]]
    weights: dict[str, Tensor]
    resumed: dict[str, Tensor]
    buckets: int
    early: int


def watch(own: RankLearner) -> list[bool]:
    """Notes, at each chunk's forward pass, whether its weights are gathered in it."""
    seen: list[bool] = []
    for chunk in own._ddp:
        chunk.register_forward_pre_hook(lambda chunk, _: seen.append(bool(chunk.remove_forward_pre_hook_handles)))
    return seen


def run(values: LearnerSettings, folder: Path) -> Seen:
    batch = packed(ragged_sequences(), values.layout, mini_batches=MINI_BATCHES)
    method = recipe(("grpo", "kl"), MINI_BATCHES)
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    with learner_on(values) as (learner, own):
        early = watch(own)
        stats = [learner.step(learner.annotate(batch, NEEDS), method) for _ in range(2)]
        weights = weights_of(learner)
        save(learner, folder)
        buckets = sum(len(buffer.buckets) for chunk in own._ddp for buffer in chunk.buffers)
    with learner_on(values) as (learner, _):
        learner.load(folder)
        learner.step(learner.annotate(batch, NEEDS), method)
        return Seen([(s.loss, s.grad_norm) for s in stats], weights, weights_of(learner), buckets, sum(early))


def on_rank(rank: int, world: int, folder: str, layout: str, root: Path) -> dict[str, tuple[Seen, Seen]]:
    values = settings(folder, LAYOUTS[layout], NEEDS, megatron=BUCKETS, diagnostics=None)
    lora = LoraConfig(rank=2, alpha=4.0, targets=["qkv", "fc2"])
    cases = {"whole": values, "lora": changed(values, lora=lora, recompute="full")}
    return {
        name: (
            run(changed(case, overlap=False), root / f"{layout}-{name}-apart"),
            run(changed(case, overlap=True), root / f"{layout}-{name}-overlapped"),
        )
        for name, case in cases.items()
    }


@pytest.mark.long("layouts")
@pytest.mark.parametrize(("world", "layout"), [(2, "dp2")])
def test_numbers_are_those_without(world: int, layout: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3-tied")
    for rank in run_ranks(world, on_rank, folder, layout, tmp_path):
        for apart, overlapped in rank.values():
            # Of two mini-batches in each step the second one's passes.
            assert overlapped.early > 0 and apart.early == 0
            for a, b in zip(apart.figures, overlapped.figures, strict=True):
                assert b == pytest.approx(a, rel=1e-5)
            for name, tensor in apart.weights.items():
                # Sums over another number of buckets are not the same to the last bit.
                torch.testing.assert_close(overlapped.weights[name], tensor, rtol=0, atol=2e-5)
                torch.testing.assert_close(overlapped.resumed[name], apart.resumed[name], rtol=0, atol=2e-5)
        assert rank["whole"][1].buckets > 1
