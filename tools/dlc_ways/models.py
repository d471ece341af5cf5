"""Pairs of random models to time: a policy, and a memory network of about a fifth of its parameters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3, by the names of its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    def config(self) -> Qwen3Config:
        """Without an end token, so that every response has the length asked for; weights wide enough to matter."""
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return Qwen3Config(**asdict(self), **ends, max_position_embeddings=_POSITIONS, initializer_range=0.06)

    def parameters(self) -> int:
        """How many it has."""
        with torch.device("meta"):
            return int(Qwen3ForCausalLM(self.config()).num_parameters())


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models for one engine. With `written`, their weights are made here; else SGLang fills in dummies."""

    policy: Shape
    memory: Shape
    dtype: str
    written: bool

    def describe(self) -> str:
        """Both sizes, as one line."""
        policy, memory = self.policy.parameters(), self.memory.parameters()
        return (
            f"policy {policy / 1e6:,.1f} M parameters, {self.policy.num_hidden_layers} layers; memory "
            f"{memory / 1e6:,.1f} M ({memory / policy:.2f} of it), {self.memory.num_hidden_layers} layers; vocabulary "
            f"{self.policy.vocab_size:,}; {self.dtype}; random weights"
        )


PAIRS = {
    # Half as deep as the policy.
    "cpu": Pair(
        Shape(768, 2304, 6, 12, 4, 64, 4096, True),
        Shape(448, 1344, 3, 8, 4, 64, 4096, True),
        dtype="float32",
        written=True,
    ),
    # Narrower and deeper: on a CPU each layer costs SGLang's Python and its calls, however small the layer is.
    "cpu-deep": Pair(
        Shape(512, 1536, 10, 8, 4, 64, 4096, True),
        Shape(256, 768, 6, 4, 4, 64, 4096, True),
        dtype="float32",
        written=True,
    ),
    "qwen3-8b-1.7b": Pair(
        Shape(4096, 12288, 36, 32, 8, 128, 151_936, False),
        Shape(2048, 6144, 28, 16, 8, 128, 151_936, True),
        dtype="bfloat16",
        written=False,
    ),
}


def write_model(folder: Path, shape: Shape, seed: int, with_weights: bool) -> Path:
    """A Hugging Face folder of this shape, of its config alone where no weights are wanted."""
    config = shape.config()
    if with_weights:
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    else:
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
    return folder
