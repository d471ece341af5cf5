"""transformers' classes of every model family that is supported, for tiny models of any sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# What the names of its classes begin with.
CLASSES = {
    "qwen3": "Qwen3",
    "qwen2": "Qwen2",
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "olmo2": "Olmo2",
}
# transformers derives it from the other sizes for the others.
_NEED_HEAD_DIM = ("qwen3", "ministral", "qwen3_moe")
# Small numbers of small experts.
_EXPERTS = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def new_model(family: str, settings: Mapping[str, object], head_dim: int) -> PreTrainedModel:
    """A model with transformers' own initial values; `head_dim` is for families that have to be told it."""
    import transformers

    config_class = getattr(transformers, f"{CLASSES[family]}Config")
    told = {"head_dim": head_dim} if family in _NEED_HEAD_DIM else {}
    model_class = getattr(transformers, f"{CLASSES[family]}ForCausalLM")
    model: PreTrainedModel = model_class(config_class(**{**told, **_EXPERTS.get(family, {}), **settings}))
    return model


def hub_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's weights as its folder names them: transformers keeps the experts of a layer in one tensor."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = model._tied_weights_keys or {} if model.config.tie_word_embeddings else {}
    held = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}
    return dict(revert_weight_conversion(model, held))
