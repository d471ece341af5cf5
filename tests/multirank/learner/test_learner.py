"""The learner's other promises: non-finite steps are skipped everywhere, offload frees and restores, annotations."""

from __future__ import annotations

import dataclasses
import gc
import math
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from launch import run_ranks
from policies import (
    LAYOUTS,
    by_sequence,
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

from megasharp.common.records import Sequence, StepBatch, StepStats
from megasharp.learner.learner import RankLearner
from megasharp.learner.optimizer import parts

MODEL = "qwen3-tied"
ALL_KINDS = ("weights", "gradients", "optimizer")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].nan_to_num(77.0), b[name].nan_to_num(77.0)) for name in a)


# --- non-finite steps -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Skipped:
    """A step that had to be skipped, and the good one after it."""

    bad: StepStats
    unchanged: bool
    moments_unchanged: bool
    good: StepStats | None = None
    moved: bool = False


def with_advantage(sequences: list[Sequence], value: float) -> list[Sequence]:
    """The last response, which only one data-parallel rank holds, has this advantage."""
    spoiled = dataclasses.replace(sequences[-1], advantage_T=torch.full_like(sequences[-1].advantage_T, value))
    return [*sequences[:-1], spoiled]


def bad_advantage(
    rank: int, world: int, folder: str, layouts: list[str], values: list[float], dtype: torch.dtype
) -> list[Skipped]:
    sequences = ragged_sequences(turns=True)
    found = []
    for name in layouts:
        layout = LAYOUTS[name]
        with learner_on(settings(folder, layout, recipe().needs, dtype=dtype)) as (learner, own):
            learner.step(packed(sequences, layout), recipe())
            for value in values:
                before, moments = weights_of(learner), moments_of(own)
                bad = learner.step(packed(with_advantage(sequences, value), layout), recipe())
                after = weights_of(learner)
                kept = all(torch.equal(x, y) for x, y in zip(moments, moments_of(own), strict=True))
                good = learner.step(packed(sequences, layout), recipe())
                found.append(Skipped(bad, same(before, after), kept, good, not same(after, weights_of(learner))))
    return found


def moments_of(own: RankLearner) -> list[Tensor]:
    optimizers = [part.optimizer for part in parts(own._optimizer)]
    return [moment.clone() for o in optimizers for state in o.state.values() for moment in state.values()]


def parameters_of(own: RankLearner) -> list[torch.nn.Parameter]:
    return [parameter for chunk in own._chunks for parameter in chunk.parameters()]


def poisoned_weight(rank: int, world: int, folder: str, layouts: list[str]) -> list[Skipped]:
    """One element of the last rank's part of the model is not a number; the other ranks' parts are well."""
    found = []
    for name in layouts:
        layout = LAYOUTS[name]
        with learner_on(settings(folder, layout, recipe().needs)) as (learner, own):
            learner.step(packed(ragged_sequences(), layout), recipe())
            if rank == world - 1:
                weight = next(own._chunks[0].decoder.layers[0].mlp.linear_fc2.parameters())
                weight.data[0, 0] = math.nan
            before = [p.detach().clone() for p in parameters_of(own)]
            moments = moments_of(own)
            bad = learner.step(packed(ragged_sequences(), layout), recipe())
            unchanged = all(
                torch.equal(x.nan_to_num(77.0), p.nan_to_num(77.0))
                for x, p in zip(before, parameters_of(own), strict=True)
            )
            kept = all(torch.equal(x, y) for x, y in zip(moments, moments_of(own), strict=True))
            found.append(Skipped(bad, unchanged, kept))
    return found


def too_large(rank: int, world: int, folder: str, layouts: list[str]) -> list[Skipped]:
    """A step with half its norm as the limit, then the same with one that is just enough."""
    found = []
    for name in layouts:
        batch = packed(ragged_sequences(), LAYOUTS[name])
        with learner_on(settings(folder, LAYOUTS[name], recipe().needs)) as (learner, own):
            norm = learner.step(batch, recipe()).grad_norm
            before, moments = weights_of(learner), moments_of(own)
            bad = learner.step(batch, recipe(), 0.5 * norm)
            after = weights_of(learner)
            kept = all(torch.equal(x, y) for x, y in zip(moments, moments_of(own), strict=True))
            good = learner.step(batch, recipe(), bad.grad_norm)
            found.append(Skipped(bad, same(before, after), kept, good, not same(after, weights_of(learner))))
    return found


def test_a_gradient_above_the_limit_is_left_out_on_all_ranks(tmp_path: Path) -> None:
    for found in run_ranks(2, too_large, save_model(tmp_path, MODEL, num_hidden_layers=2), ["dp2", "tp2", "pp2"]):
        assert len(found) == 3
        for each in found:
            assert (each.bad.skipped, each.bad.spikes) == (1, 1) and each.unchanged and each.moments_unchanged
            assert each.bad.norms == (each.bad.grad_norm,)
            assert each.good is not None and (each.good.skipped, each.good.spikes) == (0, 0) and each.moved


def skipping(rank: int, world: int, fp32: str, bf16: str) -> tuple[list[Skipped], list[Skipped]]:
    advantages = bad_advantage(rank, world, fp32, ["dp2", "tp2", "pp2"], [math.inf, math.nan], torch.float32)
    advantages += bad_advantage(rank, world, bf16, ["dp2"], [math.nan], torch.bfloat16)
    return advantages, poisoned_weight(rank, world, fp32, ["dp2", "tp2", "pp2"])


def test_non_finite_step_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    fp32 = save_model(tmp_path, MODEL, num_hidden_layers=2)
    bf16 = save_model(tmp_path / "bf16", MODEL, num_hidden_layers=2, dtype="bfloat16")
    by_rank = run_ranks(2, skipping, fp32, bf16)
    assert len(by_rank) == 2
    for advantages, poisoned in by_rank:
        assert len(advantages) == 7 and len(poisoned) == 3
        for found in (*advantages, *poisoned):
            assert found.bad.skipped == 1
            assert not (math.isfinite(found.bad.loss) and math.isfinite(found.bad.grad_norm))
            assert found.unchanged and found.moments_unchanged
        for found in advantages:
            assert found.good is not None and found.good.skipped == 0 and found.moved
            assert math.isfinite(found.good.grad_norm)


# --- clipping ---------------------------------------------------------------------------------------------------


def clipped(rank: int, world: int, folder: str) -> list[tuple[float, dict[str, Tensor]]]:
    """The gradient's norm and what a step changes, without clipping and at a norm of 1.

    With so large an epsilon Adam's first step is the gradient; otherwise it would not see the gradient's size.
    """
    layout, found = LAYOUTS["tp1"], []
    batch = packed(with_advantage(ragged_sequences(), 100.0), layout)
    for clip_grad in (0.0, 1.0):
        optimizer = optimizer_settings(lr=1e6, eps=1e6, clip_grad=clip_grad)
        with learner_on(settings(folder, layout, recipe().needs, optimizer)) as (learner, _):
            before = weights_of(learner)
            norm = learner.step(batch, recipe()).grad_norm
            found.append((norm, {name: value - before[name] for name, value in weights_of(learner).items()}))
    return found


def test_a_gradient_above_the_clip_is_scaled_down_to_it(tmp_path: Path) -> None:
    ((norm, free), (same_norm, scaled)) = run_ranks(1, clipped, save_model(tmp_path, MODEL))[0]
    assert norm == same_norm > 2.0
    size = math.sqrt(sum(float(change.double().square().sum()) for change in scaled.values()))
    assert math.isclose(size, 1.0, rel_tol=1e-3)
    for name, change in scaled.items():
        torch.testing.assert_close(change, free[name] / norm, rtol=1e-3, atol=1e-6)


# --- offload ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offloaded:
    """What was freed, and whether everything was as before afterwards. Bytes."""

    freed: int
    empty: bool
    same_weights: bool
    same_step: bool


def storages(own: RankLearner, kinds: tuple[str, ...]) -> list[torch.UntypedStorage]:
    found = []
    if "weights" in kinds:
        found += [p.untyped_storage() for p in parameters_of(own)]
    if "gradients" in kinds:
        # Megatron's own lists: experts have one of their own.
        buffers = [buffer for chunk in own._ddp for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        found += [buffer.grad_data.untyped_storage() for buffer in buffers]
    if "optimizer" in kinds:
        optimizers = [part.optimizer for part in parts(own._optimizer)]
        found += [m.untyped_storage() for o in optimizers for s in o.state.values() for m in s.values()]
    return found


def offload(rank: int, world: int, folder: str, bf16: str, mixture: str) -> list[Offloaded]:
    found = []
    runs = [(folder, "dp2", torch.float32), (folder, "tp2", torch.float32), (bf16, "dp2", torch.bfloat16)]
    runs.append((mixture, "ep2", torch.float32))
    for path, name, dtype in runs:
        layout = LAYOUTS[name]
        batch = packed(ragged_sequences(), layout)
        values = settings(path, layout, recipe().needs, dtype=dtype)
        with learner_on(values) as (learner, _):
            unbroken = [learner.step(batch, recipe()) for _ in range(3)], weights_of(learner)
        for kinds in (ALL_KINDS, ("gradients", "optimizer"), ("weights",)):
            with learner_on(changed(values, offload=kinds)) as (learner, own):
                first = learner.step(batch, recipe())
                before = weights_of(learner)
                freed = own.offload()
                empty = all(storage.size() == 0 for storage in storages(own, kinds))
                own.onload()
                weights = same(before, weights_of(learner))
                # Twice: a step must not depend on how often its memory went away.
                second = learner.step(batch, recipe())
                own.offload()
                own.onload()
                stats = [first, second, learner.step(batch, recipe())]
                step = stats == unbroken[0] and same(unbroken[1], weights_of(learner))
                found.append(Offloaded(freed, empty, weights, step))
    return found


@pytest.mark.long("layouts")
def test_offload_frees_and_restores(tmp_path: Path) -> None:
    folder, bf16 = save_model(tmp_path, MODEL), save_model(tmp_path / "bf16", MODEL, dtype="bfloat16")
    for rank in run_ranks(2, offload, folder, bf16, save_model(tmp_path, "qwen3moe")):
        assert len(rank) == 12
        for found in rank:
            assert found.freed > 0 and found.empty and found.same_weights and found.same_step


def resumed(rank: int, world: int, folder: str, checkpoint: str) -> bool:
    """Whether a learner that was loaded, exported as arrays, then offloaded, goes on as one that never stopped."""
    layout = LAYOUTS["tp2"]
    batch = packed(ragged_sequences(), layout)
    values = settings(folder, layout, recipe().needs, offload=ALL_KINDS)
    with learner_on(values) as (learner, own):
        learner.step(batch, recipe())
        save(own, Path(checkpoint))
        expected = learner.step(batch, recipe()), weights_of(learner)
    with learner_on(values) as (learner, own):
        own.load(Path(checkpoint))
        arrays = [tensor.numpy() for _, tensor in own.export_weights()]
        freed = own.offload()
        empty = all(storage.size() == 0 for storage in storages(own, ALL_KINDS))
        own.onload()
        del arrays
        good = learner.step(batch, recipe()) == expected[0] and same(expected[1], weights_of(learner))
        return freed > 0 and empty and good


def test_offload_after_a_load_and_an_export(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    assert all(run_ranks(2, resumed, save_model(tmp_path, MODEL), str(tmp_path / "checkpoint")))


def resident(rank: int, world: int, folder: str) -> tuple[int, int, int]:
    """Bytes freed by offloading gradients, by the learner's count and by the process's; and what came back."""
    layout = LAYOUTS["tp1"]
    values = settings(folder, layout, recipe().needs, offload=("gradients",))
    with learner_on(values) as (learner, own):
        learner.step(packed(ragged_sequences(), layout), recipe())
        gc.collect()
        process = psutil.Process()
        before = process.memory_info().rss
        freed = own.offload()
        after = process.memory_info().rss
        own.onload()
        return freed, before - after, process.memory_info().rss - after


def test_offloading_a_large_model_shrinks_the_process(tmp_path: Path) -> None:
    """100 MB of weights. Gradients are the part that is not kept on the host, so only they leave a CPU's memory."""
    folder = save_model(tmp_path, MODEL, hidden_size=512, intermediate_size=3072, num_hidden_layers=5)
    ((freed, fell, rose),) = run_ranks(1, resident, folder)
    assert freed > 90e6
    assert fell > 0.9 * freed and rose > 0.9 * freed


# --- annotations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Annotated:
    """Annotations before and after two steps, by sequence."""

    layout: str
    start: dict[str, dict[int, Tensor]]
    later: dict[str, dict[int, Tensor]]
    weights: dict[str, Tensor]


def fields_of(batch: StepBatch) -> dict[str, dict[int, Tensor]]:
    return {field: by_sequence(batch, field) for field in ("old_logp_T", "ref_logp_T")}


def annotate(rank: int, world: int, folder: str, layouts: list[str]) -> list[Annotated]:
    method = recipe(("grpo", "kl"), mini_batches=2)
    found = []
    for name in layouts:
        batch = packed(ragged_sequences(), LAYOUTS[name], micro_batch_tokens=24, mini_batches=2)
        with learner_on(settings(folder, LAYOUTS[name], method.needs)) as (learner, _):
            start = learner.annotate(batch, method.annotation)
            for _ in range(2):
                learner.step(learner.annotate(batch, method.annotation), method)
            later = learner.annotate(batch, method.annotation)
            found.append(Annotated(name, fields_of(start), fields_of(later), weights_of(learner)))
    return found


def direct_logp(folder: str, weights: dict[str, Tensor] | None) -> dict[int, Tensor]:
    """By transformers, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    found = {}
    for flat, sequence in enumerate(ragged_sequences()):
        with torch.no_grad():
            all_TV = model(sequence.tokens[None]).logits[0, sequence.prompt_length - 1 : -1].log_softmax(-1)
        found[flat] = all_TV.gather(1, sequence.tokens[sequence.prompt_length :, None])[:, 0]
    return found


@pytest.mark.parametrize(
    ("world", "layouts"), [(1, ["tp1"]), pytest.param(2, ["tp2", "pp2", "dp2"], marks=pytest.mark.long("layouts"))]
)
def test_old_log_probs_move_and_reference_ones_stay(tmp_path: Path, world: int, layouts: list[str]) -> None:
    folder = save_model(tmp_path, MODEL)
    at_start = direct_logp(folder, None)
    for found in run_ranks(world, annotate, folder, layouts)[0]:
        now = direct_logp(folder, found.weights)
        moved = max(float((now[flat] - at_start[flat]).abs().max()) for flat in now)
        assert moved > 0.05, "the steps must change the log-probs for this test to say anything"
        expected = [(found.start, "old_logp_T", at_start), (found.start, "ref_logp_T", at_start)]
        expected += [(found.later, "old_logp_T", now), (found.later, "ref_logp_T", at_start)]
        for observed, field, direct in expected:
            assert observed[field].keys() == direct.keys()
            for flat, logp_T in direct.items():
                torch.testing.assert_close(observed[field][flat], logp_T, atol=2e-5, rtol=0)
