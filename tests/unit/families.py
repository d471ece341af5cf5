"""transformers' classes of every model family that is supported, for tiny models of any sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What the names of its classes begin with.
CLASSES = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral", "ministral": "Ministral"}
# transformers derives it from the other sizes for the others.
_NEED_HEAD_DIM = ("qwen3", "ministral")


def new_model(family: str, settings: Mapping[str, object], head_dim: int) -> PreTrainedModel:
    """A model with transformers' own initial values; `head_dim` is for families that have to be told it."""
    import transformers

    config_class = getattr(transformers, f"{CLASSES[family]}Config")
    told = {"head_dim": head_dim} if family in _NEED_HEAD_DIM else {}
    model_class = getattr(transformers, f"{CLASSES[family]}ForCausalLM")
    model: PreTrainedModel = model_class(config_class(**{**told, **settings}))
    return model
