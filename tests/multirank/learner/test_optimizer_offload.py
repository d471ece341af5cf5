"""The optimizer's state in host memory: every number, and every file, is that of a learner without it."""

from __future__ import annotations

from collections.abc import Sequence
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

from megasharp.algos.base import Needs, OldLogp
from megasharp.config.policy import LoraConfig
from megasharp.learner import optimizer_offload
from megasharp.learner.learner import LearnerSettings
from megasharp.learner.optimizer import parts

NEEDS = Needs(old_logp=OldLogp.BEFORE_STEP, ref_logp=True)
# Clipped at every step, and with weight decay, which norms and biases have not.
OPTIMIZER = optimizer_settings(clip_grad=0.1, weight_decay=0.1)
LORA = LoraConfig(rank=2, alpha=4.0, targets=["qkv", "fc2"])


@dataclass
class Seen:
    """Figures of the steps (loss, gradient norm, skipped), and weights after them and after one more of a resume."""

    figures: list[tuple[float, float, int]]
    weights: dict[str, Tensor]
    resumed: dict[str, Tensor]


def run(values: LearnerSettings, folder: Path, resume_from: Path) -> Seen:
    """Three steps, the second one above the norm's limit; then `resume_from` in another learner, and one step more."""
    batch = packed(ragged_sequences(), values.layout, mini_batches=2)
    method = recipe(("grpo", "kl"), 2)
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    with learner_on(values) as (learner, own):
        if values.policy.optimizer_offload:
            (part,) = parts(own._optimizer)
            assert len(part.optimizer._pieces) > optimizer_offload.SLOTS or values.policy.lora
        stats = []
        for limit in (None, 0.0, None):
            own.offload()
            own.onload()
            stats.append(learner.step(learner.annotate(batch, NEEDS), method, limit))
        weights = weights_of(learner)
        learner.begin_save(folder, copy=True)
        learner.step(batch, recipe(mini_batches=2))
        learner.finish_saves()
    if not resume_from.is_dir():
        return Seen([(s.loss, s.grad_norm, s.skipped) for s in stats], weights, {})
    with learner_on(values) as (learner, own):
        learner.load(resume_from)
        again = folder.with_name(f"{folder.name}-again")
        if dist.get_rank() == 0:
            again.mkdir()
        dist.barrier()
        save(learner, again)
        learner.load(again)
        learner.step(learner.annotate(batch, NEEDS), method)
        learner.reset_optimizer()
        learner.step(learner.annotate(batch, NEEDS), method)
        return Seen([(s.loss, s.grad_norm, s.skipped) for s in stats], weights, weights_of(learner))


CHANGES = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {},
    "overlapped": {"overlap": True, "megatron": {"bucket_size": 3000}},
    "lora": {"lora": LORA},
}


def on_rank(
    rank: int, world: int, folder: str, layout: str, names: Sequence[str], root: Path
) -> dict[str, dict[bool, Seen]]:
    # So that the tiny models' parameters are cut.
    optimizer_offload.PIECE = 256
    given = settings(
        folder,
        LAYOUTS[layout],
        NEEDS,
        OPTIMIZER,
        diagnostics=None,
        offload=("gradients", "optimizer"),
        dtype=torch.bfloat16,
    )
    results: dict[str, dict[bool, Seen]] = {}
    for name in names:
        case = changed(given, **CHANGES[name])
        folders = {on: root / f"{layout}-{name}-{on}" for on in (False, True)}
        # Each resumes from what the other saved, the first one from its own.
        results[name] = {
            on: run(changed(case, optimizer_offload=on), folders[on], folders[False]) for on in (False, True)
        }
        plain = results[name][False]
        with learner_on(changed(case, optimizer_offload=False)) as (learner, _):
            learner.load(folders[True])
            batch = packed(ragged_sequences(), case.layout, mini_batches=2)
            method = recipe(("grpo", "kl"), 2)
            learner.step(learner.annotate(batch, NEEDS), method)
            learner.reset_optimizer()
            learner.step(learner.annotate(batch, NEEDS), method)
            plain.resumed = weights_of(learner)
    return results


@pytest.mark.parametrize(
    ("layout", "names"),
    [("tp1", ("float32",)), pytest.param("dp2", ("overlapped",), marks=pytest.mark.long("layouts"))],
)
def test_every_number_is_that_of_a_learner_without(layout: str, names: tuple[str, ...], tmp_path: Path) -> None:
    check(layout, names, tmp_path)


def check(layout: str, names: Sequence[str], root: Path) -> None:
    """These cases in this layout, bit for bit."""
    folder = save_model(root, "qwen3-tied")
    for rank in run_ranks(LAYOUTS[layout].world, on_rank, folder, layout, names, root):
        assert rank.keys() == set(names)
        for name, both in rank.items():
            plain, held = both[False], both[True]
            assert [skipped for *_, skipped in plain.figures] == [0, 2, 0]
            assert held.figures == plain.figures, name
            assert held.weights.keys() == plain.weights.keys()
            for key, tensor in plain.weights.items():
                assert torch.equal(held.weights[key], tensor), f"{name}: {key}"
                assert torch.equal(held.resumed[key], plain.resumed[key]), f"{name}, resumed: {key}"
            assert any(not torch.equal(plain.resumed[key], tensor) for key, tensor in plain.weights.items())
