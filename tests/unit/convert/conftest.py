"""Tiny random Hugging Face models, and a machine without a network."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from megasharp.common.records import as_dtype
from tests.unit.families import new_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 53,
    "max_position_embeddings": 64,
}

MakeModel = Callable[..., "PreTrainedModel"]
SaveModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to reach another machine fails the test."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def make_model() -> MakeModel:
    """`make_model(family, **config overrides)`: every parameter random, norms and biases too."""

    def make(family: str, **overrides: object) -> PreTrainedModel:
        torch.manual_seed(0)
        model = new_model(family, {**SIZES, **overrides}, head_dim=8)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        return model.to(as_dtype(str(overrides.get("dtype", "float32"))))

    return make


@pytest.fixture
def save_model(tmp_path: Path, make_model: MakeModel) -> SaveModel:
    """`save_model(family, shard=bytes or None, **config overrides)`: the folder transformers writes."""

    def save(family: str = "qwen3", shard: int | None = None, **overrides: object) -> Path:
        folder = tmp_path / "model"
        size = "1GB" if shard is None else shard
        make_model(family, **overrides).save_pretrained(folder, max_shard_size=size)
        return folder

    return save
