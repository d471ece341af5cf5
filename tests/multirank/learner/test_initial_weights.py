"""A learner begins the same from a Hugging Face folder and from what was converted of it, at any layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from policies import LAYOUTS, learner_on, packed, ragged_sequences, recipe, save_model, settings, weights_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import StepStats
from megasharp.config.policy import LoraConfig
from megasharp.convert.lora import TARGETS
from megasharp.learner.conversion import hf_to_megatron

METHOD = recipe(("grpo", "kl"))
NORM = "model.layers.2.input_layernorm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@dataclass(frozen=True)
class Case:
    """A model, where its shards begin by the conversion's hint, the layouts to load at, and a setting of the learner.

    The vocabulary is odd: two tensor-parallel ranks pad it, one does not.
    """

    model: str
    tp: int
    pp: int
    layouts: tuple[str, ...]
    dtype: torch.dtype = torch.float32
    lora: LoraConfig | None = None


CASES = {
    1: Case("qwen3-tied", 2, 2, ("tp1",)),
    2: Case("qwen3-tied", 1, 1, ("tp2", "pp2", "dp2")),
    3: Case("qwen3", 2, 1, ("pp3vpp2",), dtype=torch.bfloat16),
    4: Case("qwen2", 1, 1, ("tp2pp2",), lora=LoraConfig(rank=4, alpha=8.0, targets=list(TARGETS))),
}
# Each chunk of three stages' two has one.
LAYERS = {3: 6}


def begun(folder: Path, layout: ParallelLayout, case: Case) -> tuple[dict[str, Tensor], StepStats, dict[str, Tensor]]:
    """The first weights, what the first step reports, and the weights that it makes."""
    batch = packed(ragged_sequences(), layout, micro_batch_tokens=32)
    with learner_on(settings(str(folder), layout, METHOD.needs, dtype=case.dtype, lora=case.lora)) as (learner, _):
        first = weights_of(learner)
        stats = learner.step(learner.annotate(batch, METHOD.annotation), METHOD)
        return first, stats, weights_of(learner)


def compare(rank: int, world: int, source: Path, megatron: Path) -> float:
    case = CASES[world]
    for name in case.layouts:
        (first, stats, after), (first_again, stats_again, after_again) = (
            begun(folder, LAYOUTS[name], case) for folder in (source, megatron)
        )
        assert stats.loss != 0.0 and not stats.skipped
        assert (stats.loss, stats.grad_norm, stats.metrics) == (
            stats_again.loss,
            stats_again.grad_norm,
            stats_again.metrics,
        )
        for weights, again in ((first, first_again), (after, after_again)):
            assert weights.keys() == again.keys()
            for tensor_name, tensor in weights.items():
                assert torch.equal(tensor, again[tensor_name]), f"{tensor_name} at {name}"
    return stats.loss


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=[pytest.mark.long("ranks")] if world > 1 else []) for world in CASES]
)
def test_a_run_from_a_converted_folder_is_the_run_from_its_source(tmp_path: Path, world: int) -> None:
    case = CASES[world]
    source = Path(save_model(tmp_path, case.model, num_hidden_layers=LAYERS.get(world, 4)))
    hf_to_megatron(source, tmp_path / "megatron", tp=case.tp, pp=case.pp)
    losses = run_ranks(world, compare, source, tmp_path / "megatron")
    assert set(losses) == {losses[0]}


def refused(rank: int, world: int, folder: Path, dtype: torch.dtype) -> str:
    with pytest.raises(UserError) as caught:
        begun(folder, LAYOUTS["tp1"], Case("qwen3", 1, 1, (), dtype))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "dtype", "message"),
    [
        (NORM, float("nan"), torch.float32, f"tensor {NORM} holds NaN or infinite values"),
        (UP, float("-inf"), torch.float32, f"tensor {UP} holds NaN or infinite values"),
        (NORM, 1e6, torch.float16, f"tensor {NORM} holds values that are too large for float16"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(
    tmp_path: Path, name: str, value: float, dtype: torch.dtype, message: str
) -> None:
    source = Path(save_model(tmp_path, "qwen3"))
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    (error,) = run_ranks(1, refused, source, dtype)
    assert error.startswith(f"{file}: {message}") and "\n" not in error
    hf_to_megatron(source, tmp_path / "megatron")
    (error,) = run_ranks(1, refused, tmp_path / "megatron", dtype)
    assert error.startswith(f"{tmp_path / 'megatron' / 'policy'}: tensor decoder.layers.") and "\n" not in error


@pytest.mark.parametrize("name", ["common.pt", "metadata.json"])
def test_files_beside_the_shards_that_are_lost_are_named(tmp_path: Path, name: str) -> None:
    hf_to_megatron(Path(save_model(tmp_path, "qwen3")), tmp_path / "megatron")
    (tmp_path / "megatron" / "policy" / name).unlink()
    (error,) = run_ranks(1, refused, tmp_path / "megatron", torch.float32)
    assert error.endswith(f"these weights cannot be loaded: {name} is missing, copy the whole folder")
