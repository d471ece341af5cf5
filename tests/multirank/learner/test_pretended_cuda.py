"""What training does on a GPU, as far as a machine without one can tell: every tensor is where it has to be."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from policies import packed, ragged_sequences, recipe, save_model, settings
from pretended_cuda import GPU, RUNTIME, MixedDevices, all_on, pretended_cuda

from megasharp.common.layout import ParallelLayout
from megasharp.common.records import MEMORY_PREFIX, Completion, GenerateRequest, SamplingParams, StepStats
from megasharp.config.policy import LoraConfig
from megasharp.convert.hf_folder import HFReader
from megasharp.learner.learner import POLICY, LearnerSettings, RankLearner
from megasharp.learner.ranks.all_ranks import OneRank, RanksLearner
from megasharp.metrics.group_metrics import Diagnostics
from megasharp.trainer.factories import make_engine

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"

MODELS = ("qwen3-tied", "ministral", "olmo2")
RECIPES = (
    ("grpo", "kl", "entropy_bonus"),
    ("dapo", "iac", "ds"),
    ("grpo", "casp"),
    ("gspo_n",),
)


@contextmanager
def learner_on(own: LearnerSettings, device: torch.device) -> Iterator[RanksLearner]:
    learner = RanksLearner(OneRank({POLICY: own}, device))
    try:
        yield learner
    finally:
        learner.close()


def test_the_stand_in_finds_what_was_not_moved() -> None:
    with pretended_cuda() as gpu:
        there, here = torch.ones(3, device=gpu), torch.ones(3)
        assert there.device == GPU and there.is_cuda and not here.is_cuda
        with pytest.raises(MixedDevices):
            there + here
        weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
        (weight * here.to(gpu)).sum().backward()
        assert weight.grad is not None and (weight.grad + there).cpu().device.type == "cpu"
    assert not there.is_cuda


def steps(
    folder: str, methods: tuple[str, ...], device: torch.device
) -> tuple[list[StepStats], dict[str, torch.Tensor]]:
    chosen, layout = recipe(methods), ParallelLayout()
    own = settings(folder, layout, chosen.needs, diagnostics=Diagnostics(3, 4))
    with learner_on(own, device) as learner:
        stats = []
        for seed in (1, 2):
            batch = learner.annotate(packed(ragged_sequences(seed), layout), chosen.annotation)
            batch, _ = chosen.calibrate(batch)
            stats.append(learner.step(batch, chosen))
        exported = dict(learner.export_weights())
        assert all_on(device, exported.values())
        return stats, {name: tensor.clone() for name, tensor in exported.items()}


@pytest.mark.parametrize(
    "methods",
    [RECIPES[0], *(pytest.param(methods, marks=pytest.mark.long("layouts")) for methods in RECIPES[1:])],
    ids="+".join,
)
def test_a_step_is_the_cpus(tmp_path: Path, methods: tuple[str, ...]) -> None:
    folder = save_model(tmp_path, MODELS[RECIPES.index(methods) % len(MODELS)])
    expected, weights = steps(folder, methods, torch.device("cpu"))
    with pretended_cuda() as gpu:
        found, there = steps(folder, methods, gpu)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert mine.metrics.keys() == theirs.metrics.keys()
    assert there.keys() == weights.keys()
    reader = HFReader(folder)
    for name, weight in weights.items():
        # Adam makes a step of the learning rate out of an element's rounding, so that elements prove nothing.
        assert (there[name] - weight).norm() <= 1e-2 * (weight - reader.tensor(name)).norm(), name


@pytest.mark.long("layouts")
def test_weights_come_and_go(tmp_path: Path) -> None:
    """Adapters, offload, the reference in its place on the host, and shards that a CPU wrote."""
    folder = save_model(tmp_path, "qwen3-tied")
    chosen, layout = recipe(("grpo", "kl")), ParallelLayout()
    own = settings(
        folder,
        layout,
        chosen.needs,
        offload=("weights", "gradients", "optimizer"),
        lora=LoraConfig(rank=4, alpha=8.0, targets=["qkv", "fc2"]),
    )
    batch = packed(ragged_sequences(), layout)
    (tmp_path / "state").mkdir()
    (tmp_path / "reference").mkdir()
    with learner_on(own, torch.device("cpu")) as learner:
        learner.step(learner.annotate(batch, chosen.annotation), chosen)
        learner.begin_save(tmp_path / "state", False)
        learner.begin_save_reference(tmp_path / "reference")
        learner.finish_saves()
        expected = learner.step(learner.annotate(batch, chosen.annotation), chosen)
    with pretended_cuda() as gpu, learner_on(own, gpu) as learner:
        learner.load(tmp_path / "state")
        learner.load_reference(tmp_path / "reference")
        learner.offload()
        learner.onload()
        found = learner.step(learner.annotate(batch, chosen.annotation), chosen)
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def held_by(learner: RankLearner) -> tuple[int, int, int]:
    """Bytes of trained weights, of all that offloading keeps, and of page-locked memory after doing it twice."""
    trained = sum(weight.nbytes for weight in learner._trained())
    gradients = sum(buffer.grad_data.nbytes for chunk in learner._ddp for buffer in chunk.buffers)
    assert sum(RUNTIME.locked.values()) == trained
    kept = []
    for _ in range(2):
        kept.append(learner.offload() - gradients)
        learner.onload()
        kept.append(sum(RUNTIME.locked.values()) - trained)
    assert kept == [kept[0]] * 4
    # Moments that are gone take no room there.
    learner.reset_optimizer()
    fewer = learner.offload() - gradients
    learner.onload()
    return trained, kept[0], fewer


@pytest.mark.long("layouts")
def test_what_is_held_on_the_host_is_locked_and_no_larger_than_it_is(tmp_path: Path) -> None:
    """The reference and what offloading keeps; torch's own allocator would round each size up to a power of two."""
    chosen, layout = recipe(("grpo", "kl")), ParallelLayout()
    folder = save_model(tmp_path, "qwen3-tied")
    own = settings(folder, layout, chosen.needs, offload=("weights", "gradients", "optimizer"))
    batch = packed(ragged_sequences(), layout)
    with pretended_cuda() as gpu:
        ranks = OneRank({POLICY: own}, gpu)
        learner = RanksLearner(ranks)
        try:
            learner.step(learner.annotate(batch, chosen.annotation), chosen)
            ((trained, kept, fewer),) = ranks.call(POLICY, held_by)
            assert kept >= 3 * trained > 0 and fewer == kept - 2 * trained
        finally:
            learner.close()
        del learner, ranks
        gc.collect()
        assert RUNTIME.locked == {}


@pytest.mark.long("layouts")
def test_the_comparison_that_waits_for_a_gpu_can_be_made() -> None:
    """tests/gpu's of the head's kernels, whose place torch's arithmetic takes here."""
    tests = Path(__file__).parents[2]
    sys.path.insert(0, str(tests / "unit" / "ops"))
    spec = importlib.util.spec_from_file_location("head_on_gpu", tests / "gpu" / "test_head.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pretended_cuda():
        module.test_equal_to_the_oracle(torch.float32, 3, 1)


@pytest.mark.parametrize("mu", [None, 0.3])
def test_the_engine_samples_what_it_does_on_the_cpu(mu: float | None) -> None:
    requests = [GenerateRequest((6, 7 + n, 8, 9), (2 * n, 2 * n + 1)) for n in range(3)]
    sampling = SamplingParams(max_tokens=6, stop_token_ids=(1,), temperature=0.8, top_p=0.9, memory_mu=mu)

    def completions(device: torch.device) -> list[Completion]:
        engine = make_engine(QUICKSTART / "base", torch.float32, device, QUICKSTART / "memory")
        with HFReader(QUICKSTART / "base") as policy, HFReader(QUICKSTART / "memory") as memory:
            tensors = [(name, policy.tensor(name)) for name in policy.names()]
            tensors += [(MEMORY_PREFIX + name, memory.tensor(name)) for name in memory.names()]
        engine.load_weights(0, tensors)
        return [completion for group in engine.generate(requests, sampling) for completion in group]

    expected = completions(torch.device("cpu"))
    with pretended_cuda() as gpu:
        found = completions(gpu)
        assert all_on(torch.device("cpu"), [completion.tokens for completion in found])
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.tokens, theirs.tokens)
        assert torch.allclose(mine.policy_logp, theirs.policy_logp, atol=1e-5)
