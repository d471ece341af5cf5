"""Megatron with Transformer Engine's layer spec beside the local one, on ranks over gloo; what they found, as a file.

    PYTHONPATH=tests/stand_ins python transformer_engine_program.py FOLDER RESULTS

A program of its own: Megatron takes what it finds of Transformer Engine when it is imported, and here it is to find the
stand-in. `FOLDER` holds models that transformers wrote. Used by test_transformer_engine.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from launch import run_ranks
from policies import (
    LAYOUTS,
    changed,
    learner_on,
    optimizer_settings,
    packed,
    ragged_sequences,
    recipe,
    save,
    settings,
    weights_of,
)
from torch import Tensor

from megasharp.algos.base import Needs, OldLogp
from megasharp.common.records import MicroBatch
from megasharp.config.policy import LoraConfig
from megasharp.learner import learner
from megasharp.learner.learner import LearnerSettings, RankLearner
from megasharp.ops.attention_kernels import Kernels

MODELS = ("qwen3-tied", "qwen2", "olmo2")
# Of one of experts, which are grouped.
MIXTURE = "qwen3moe"
NEEDS = Needs(old_logp=OldLogp.BEFORE_STEP, old_entropy=True)
STEPS = 3
# One of each kind of map stays Transformer Engine's.
LORA = LoraConfig(rank=2, alpha=4.0, targets=["qkv", "fc2"])


@dataclass
class Trained:
    """What one spec's learner did: the log-probs of the start, figures of each step, and its weights at both ends."""

    logp: list[Tensor]
    norms: list[float]
    losses: list[float]
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    fused: int
    sums: int = 0
    loaded: dict[str, Tensor] | None = None
    one_more: float = 0.0


def on_rank(rank: int, world: int, folder: Path) -> dict[str, dict[bool, Trained]]:
    """Every model and variant at this number of ranks, by both specs; each loads what the other saved."""
    layout = LAYOUTS[f"tp{world}"]
    # Its experts are spread over the tensor-parallel ranks.
    spread = replace(layout, ep=world)
    cases: dict[str, LearnerSettings] = {
        model: settings(str(folder / model), layout, NEEDS, diagnostics=None) for model in MODELS
    }
    first = cases[MODELS[0]]
    cases["lora"] = changed(first, lora=LORA)
    cases[MIXTURE] = settings(str(folder / MIXTURE), spread, NEEDS, diagnostics=None)
    # With Adam's own eps the third step's norm differs by 4e-5, from rounding.
    cases["olmo2-lora"] = changed(cases["olmo2"], lora=LORA, optimizer=optimizer_settings(eps=1e-6))
    if world == 1:
        cases["selective"] = changed(first, recompute="selective")
        cases["full"] = changed(first, recompute="full")
        cases["bfloat16"] = changed(first, dtype=torch.bfloat16)
    results: dict[str, dict[bool, Trained]] = {}
    for name, values in cases.items():
        results[name] = {}
        for engine in (False, True):
            saved = folder / f"saved-{name}-{world}-{engine}"
            if rank == 0:
                saved.mkdir()
            torch.distributed.barrier()
            results[name][engine] = train(changed(values, transformer_engine=engine), saved)
        for engine in (False, True):
            other = folder / f"saved-{name}-{world}-{not engine}"
            resume(changed(values, transformer_engine=engine), other, results[name][engine])
    if world == 1:
        results["attention"] = {True: by_its_attention(changed(first, recompute="selective"), folder)}
        results["fp8"] = {True: in_fp8(changed(cases["bfloat16"], transformer_engine=True))}
    return results


def train(values: LearnerSettings, folder: Path) -> Trained:
    """Some steps on one batch, and a checkpoint."""
    batch = packed(ragged_sequences(), values.layout)
    grpo = recipe()
    with learner_on(values) as (learner, own):
        start = weights_of(learner)
        annotated = learner.annotate(batch, NEEDS)
        stats = [learner.step(annotated, grpo) for _ in range(STEPS)]
        save(learner, folder)
        return Trained(
            logp=[micro.inputs.old_logp_T for micro in micros(annotated)],
            norms=[float(step.grad_norm) for step in stats],
            losses=[float(step.loss) for step in stats],
            start=start,
            end=weights_of(learner),
            fused=fused_norms(own),
            sums=fused_sums(own),
        )


def resume(values: LearnerSettings, folder: Path, into: Trained) -> None:
    """A new learner of this spec from the other spec's checkpoint: its weights, and one more step's gradient norm."""
    batch = packed(ragged_sequences(), values.layout)
    with learner_on(values) as (learner, _):
        learner.load(folder)
        into.loaded = weights_of(learner)
        into.one_more = float(learner.step(learner.annotate(batch, NEEDS), recipe()).grad_norm)


def by_its_attention(values: LearnerSettings, folder: Path) -> Trained:
    """Steps with Transformer Engine's attention in the local layers, which CPUs have of the stand-in alone."""
    learner.take_up = lambda wanted, *site: Kernels("te", f"because policy.attention={wanted}")
    saved = folder / "saved-attention"
    saved.mkdir()
    values = changed(values, transformer_engine=False, attention="te")
    trained = train(values, saved)
    resume(changed(values, attention="auto"), saved, trained)
    return trained


def in_fp8(values: LearnerSettings) -> Trained:
    """A step under FP8's contexts, which round nothing in the stand-in: `fused` counts how often they were entered."""
    from transformer_engine.pytorch.fp8 import ENTERED

    with learner_on(changed(values, fp8="hybrid", fp8_recipe="blockwise")) as (learner, _):
        batch = packed(ragged_sequences(), values.layout)
        step = learner.step(learner.annotate(batch, NEEDS), recipe())
        weights = weights_of(learner)
        return Trained([], [step.grad_norm], [step.loss], {}, weights, ENTERED["Float8BlockScaling hybrid"])


def micros(batch: Any) -> list[MicroBatch]:
    """All of a batch's micro-batches."""
    return [micro for mini in batch.mini_batches for share in mini.per_rank for micro in share]


def fused_norms(own: RankLearner) -> int:
    """How many norms of this rank are one module with the map behind them."""
    return sum(name.endswith(".layer_norm_weight") for chunk in own._chunks for name, _ in chunk.named_parameters())


def fused_sums(own: RankLearner) -> int:
    """How many maps of this rank add their weight's gradient to Megatron's buffer themselves."""
    modules = [module for chunk in own._chunks for module in chunk.modules()]
    return sum(getattr(module, "fuse_wgrad_accumulation", False) for module in modules)


def main(folder: Path, results: Path) -> None:
    """One and two ranks."""
    torch.save({world: run_ranks(world, on_rank, folder) for world in (1, 2)}, results)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    # Functions that ranks call belong to a module with a name.
    import transformer_engine_program

    transformer_engine_program.main(Path(sys.argv[1]), Path(sys.argv[2]))
