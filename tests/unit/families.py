"""transformers' classes of every model family that is supported, for tiny models of any sizes."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CLASSES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "ministral": (MinistralConfig, MinistralForCausalLM),
}
# transformers derives it from the other sizes for the others.
_NEED_HEAD_DIM = ("qwen3", "ministral")


def new_model(family: str, settings: Mapping[str, object], head_dim: int) -> PreTrainedModel:
    """A model with transformers' own initial values; `head_dim` is for families that have to be told it."""
    config_class, model_class = CLASSES[family]
    told = {"head_dim": head_dim} if family in _NEED_HEAD_DIM else {}
    model: PreTrainedModel = model_class(config_class(**{**told, **settings}))
    return model
