"""On a GPU the optimizer's state is in locked host memory at its exact size; weights, gradients and updates are not."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from policies import optimizer_settings, packed, ragged_sequences, recipe, save, save_model, settings
from pretended_cuda import GPU, RUNTIME, all_on, pretended_cuda
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.common.layout import ParallelLayout
from megasharp.learner import flash_varlen, optimizer_offload
from megasharp.learner.learner import POLICY, LearnerSettings, Rank, RankLearner
from megasharp.learner.optimizer import parts
from megasharp.learner.optimizer_offload import StreamedAdam, gradients_of
from megasharp.learner.ranks.all_ranks import OneRank, RanksLearner

HOST = torch.device("cpu")
METHOD = recipe(("grpo", "kl"))


def values(folder: str, on_host: bool, dtype: torch.dtype = torch.bfloat16) -> LearnerSettings:
    return settings(
        folder,
        ParallelLayout(),
        METHOD.needs,
        optimizer_settings(clip_grad=0.1, weight_decay=0.1),
        dtype=dtype,
        diagnostics=None,
        optimizer_offload=on_host,
        offload=("weights", "gradients", "optimizer"),
    )


@contextmanager
def learner_of(own: LearnerSettings, device: torch.device) -> Iterator[tuple[RanksLearner, RankLearner]]:
    ranks = OneRank({POLICY: own}, device)
    learner = RanksLearner(ranks)
    try:
        yield learner, rank_of(ranks).learners[POLICY]
    finally:
        learner.close()


def rank_of(ranks: OneRank) -> Rank:
    (rank,) = (value for value in vars(ranks).values() if isinstance(value, Rank))
    return rank


def adam_of(own: RankLearner) -> StreamedAdam:
    (part,) = parts(own._optimizer)
    assert isinstance(part.optimizer, StreamedAdam)
    return part.optimizer


def state_of(adam: StreamedAdam) -> list[Tensor]:
    return [tensor for state in adam.state.values() for tensor in state.values()]


def run(own: RankLearner, learner: RanksLearner, seeds: tuple[int, ...]) -> list[tuple[float, float]]:
    figures = []
    for seed in seeds:
        batch = learner.annotate(packed(ragged_sequences(seed), ParallelLayout()), METHOD.annotation)
        stats = learner.step(batch, METHOD)
        figures.append((stats.loss, stats.grad_norm))
        learner.offload()
        learner.onload()
    return figures


@pytest.mark.long("layouts")
def test_where_everything_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_places(tmp_path, torch.bfloat16, monkeypatch)


def check_places(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tensors are while a learner steps, sleeps, saves and resumes, and that its figures are the usual ones."""
    # Of the attention's kernels there is no stand-in here.
    monkeypatch.setattr(flash_varlen, "supports", lambda query: False)
    folder = save_model(tmp_path, "qwen3-tied")
    for name in ("saved", "saved-again"):
        (tmp_path / name).mkdir()
    with pretended_cuda() as gpu, mock.patch.object(optimizer_offload, "PIECE", 512):
        with learner_of(values(folder, False, dtype), gpu) as (learner, own):
            expected = run(own, learner, (1, 2))
            weights = {name: tensor.clone() for name, tensor in learner.export_weights()}
            save(learner, tmp_path / "saved")
            after = run(own, learner, (3,))
            (plain,) = parts(own._optimizer)
            freed = {kind: own._offloader.offload((kind,)) for kind in ("optimizer",)}
            own._offloader.onload()
        with learner_of(values(folder, True, dtype), gpu) as (learner, own):
            adam, chunks, apply = adam_of(own), own._ddp, StreamedAdam._apply
            where: list[set[torch.device]] = []

            def seen(self: StreamedAdam, group: dict[str, Any], *tensors: list[Tensor]) -> None:
                where.append({tensor.device for each in tensors for tensor in each})
                apply(self, group, *tensors)

            with mock.patch.object(StreamedAdam, "_apply", seen):
                figures = run(own, learner, (1, 2))
            assert where and set().union(*where) == {GPU}
            mains = [p for group in adam.param_groups for p in group["params"]]
            assert all_on(HOST, state_of(adam))
            assert all_on(HOST if dtype is torch.bfloat16 else GPU, mains)
            assert all_on(GPU, (p for chunk in chunks for p in chunk.parameters()))
            assert all_on(GPU, gradients_of(chunks))
            # Same kernels, same bits.
            assert figures == expected
            found = dict(learner.export_weights())
            assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
            # All of it is locked, nothing is rounded up, and nothing else of the optimizer is left to move.
            total = adam._moments[0].numel()
            assert total == sum(-(-p.numel() // 64) * 64 for p in mains)
            held = [flat for flat in (*adam._moments, adam._mains) if flat.numel()]
            assert len(held) == (3 if dtype is torch.bfloat16 else 2)
            assert all(RUNTIME.locked[flat.data_ptr()] == 4 * total for flat in held)
            assert freed["optimizer"] > 0 and own._offloader.offload(("optimizer",)) == 0
            own._offloader.onload()
            # From and to a checkpoint of a learner without.
            learner.load(tmp_path / "saved")
            assert all_on(HOST, state_of(adam_of(own))) and adam_of(own) is adam
            save(learner, tmp_path / "saved-again")
            assert run(own, learner, (3,)) == after
        with learner_of(values(folder, False, dtype), gpu) as (learner, own):
            learner.load(tmp_path / "saved-again")
            assert run(own, learner, (3,)) == after
            (plain,) = parts(own._optimizer)
            assert all_on(GPU, (t for state in plain.optimizer.state.values() for t in state.values()))
        del adam, held, own, learner, mains
        gc.collect()
        assert RUNTIME.locked == {}


def test_memory_that_cannot_be_locked_is_told_in_one_line() -> None:
    told = r"^policy.optimizer_offload: 0.0 GB of host memory could not be page-locked \(CUDA error 2\).*=false$"
    with (
        pretended_cuda() as gpu,
        mock.patch.object(RUNTIME, "refuses", True),
        pytest.raises(UserError, match=told),
    ):
        StreamedAdam([{"params": [torch.zeros(10, device=gpu)]}], {}, gpu)
