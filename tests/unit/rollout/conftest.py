"""Tiny random Hugging Face models, made on the fly, and engines that hold their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from megasharp.rollout.inprocess import InProcessEngine
from tests.unit.families import hub_weights, new_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES = {
    "vocab_size": 23,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}

MakeModel = Callable[..., "tuple[PreTrainedModel, Path]"]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """A random model whose norms and biases are random too, and its folder (config.json only)."""

    def make(family: str = "qwen3", *, seed: int = 0, **changes: object) -> tuple[PreTrainedModel, Path]:
        torch.manual_seed(seed)
        model = new_model(family, {**SIZES, **changes}, head_dim=16).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        model.config.architectures = [type(model).__name__]
        folder = tmp_path / f"{family}-{seed}"
        model.config.save_pretrained(folder)
        return model, folder

    return make


def engine_of(
    model: PreTrainedModel, folder: Path, *, memory: tuple[PreTrainedModel, Path] | None = None, **options: int | None
) -> InProcessEngine:
    """A float32 CPU engine that serves `model`, and `memory` beside it where given, as version 0."""
    second = memory[1] if memory else None
    engine = InProcessEngine(folder, dtype=torch.float32, device=torch.device("cpu"), memory_folder=second, **options)
    engine.load_weights(0, named_weights(model, memory[0] if memory else None))
    return engine


def named_weights(model: PreTrainedModel, memory: PreTrainedModel | None) -> list[tuple[str, torch.Tensor]]:
    """What a sync sends for a policy and its memory network."""
    beside = hub_weights(memory).items() if memory else ()
    return [*hub_weights(model).items(), *((f"memory.{name}", tensor) for name, tensor in beside)]
