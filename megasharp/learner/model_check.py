"""Compare a built GPTModel with its config.json, read a second time: from its text, not through `Architecture`.

A mistake in a family's table would otherwise show as nothing but worse training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel

from megasharp.common.errors import UserError
from megasharp.convert.architecture import Architecture
from megasharp.learner.norms import NormedAdd, WholeNormAttention

# (config.json's key, its value or None where it is silent, the model's)
_Compared = tuple[str, object, object]

_TYPES_WITH_QKV_BIAS = ("qwen2",)
_TYPES_WITH_QK_NORM = ("qwen3", "qwen3_moe")
# Their head_dim has a default of its own, whatever the other sizes are.
_TYPES_WITH_OWN_HEAD_DIM = ("qwen3", "ministral")
_TYPES_WITH_QK_NORM_WHOLE = ("olmo2",)
_TYPES_WITH_POST_NORM = ("olmo2",)
_TYPES_WITH_A_WINDOW_EVERYWHERE = ("mistral", "mixtral")
# Mixtures of experts whose router divides the chosen experts' weights by their sum, and whose experts are as wide as
# `intermediate_size`, without keys that say so.
_TYPES_WITH_NORMALISED_EXPERTS = ("mixtral",)


def check_model(model: GPTModel, arch: Architecture, config_file: Path) -> None:
    """Compare each argument of the whole model (one tensor-parallel rank), and `arch`'s rope, with the file's text.

    Raises:
        UserError: they differ; names every key with both values.
    """
    raw = json.loads(config_file.read_text(encoding="utf-8"))
    found = [
        f"{key}={wanted} but the Megatron model has {built}"
        for key, wanted, built in (*_transformer(model, raw), *_rope(arch, raw))
        if wanted is not None and wanted != built
    ]
    if found:
        raise UserError(f"{config_file}: {'; '.join(found)}: this model's family is not read rightly, report it")


def _transformer(model: GPTModel, raw: Mapping[str, Any]) -> Iterator[_Compared]:
    config = model.config
    heads = raw.get("num_attention_heads")
    yield "num_hidden_layers", raw.get("num_hidden_layers"), config.num_layers
    yield "hidden_size", raw.get("hidden_size"), config.hidden_size
    yield "num_attention_heads", heads, config.num_attention_heads
    yield "num_key_value_heads", raw.get("num_key_value_heads"), config.num_query_groups
    yield "head_dim", _head_dim(raw), config.kv_channels
    yield "intermediate_size", raw.get("intermediate_size"), config.ffn_hidden_size
    yield "rms_norm_eps", raw.get("rms_norm_eps"), config.layernorm_epsilon
    yield "vocab_size", raw.get("vocab_size"), model.vocab_size
    yield "tie_word_embeddings", raw.get("tie_word_embeddings"), model.share_embeddings_and_output_weights
    yield "max_position_embeddings", raw.get("max_position_embeddings"), model.max_sequence_length
    yield "hidden_act", raw.get("hidden_act"), "silu" if config.activation_func is F.silu else "another"
    # Types whose configuration has no key for it, and which always have the bias.
    qkv_bias = True if raw.get("model_type") in _TYPES_WITH_QKV_BIAS else raw.get("attention_bias")
    yield "attention_bias", qkv_bias, config.add_qkv_bias
    yield "qk_norm", raw.get("model_type") in _TYPES_WITH_QK_NORM, config.qk_layernorm
    layer = model.decoder.layers[0]
    whole = isinstance(layer.self_attention, WholeNormAttention)
    yield "qk_norm_whole", raw.get("model_type") in _TYPES_WITH_QK_NORM_WHOLE, whole
    yield "post_norm", raw.get("model_type") in _TYPES_WITH_POST_NORM, isinstance(layer.mlp_bda, NormedAdd)
    yield "mlp_bias", raw.get("mlp_bias"), config.add_bias_linear
    if config.num_moe_experts is not None:
        yield from _experts(model, raw)
    windows = [layer.self_attention.core_attention.window for layer in model.decoder.layers]
    yield "windows (sliding_window, layer_types)", _windows(raw), windows


def _experts(model: GPTModel, raw: Mapping[str, Any]) -> Iterator[_Compared]:
    config, normalised = model.config, raw.get("model_type") in _TYPES_WITH_NORMALISED_EXPERTS
    count = raw.get("num_experts", raw.get("num_local_experts"))
    yield "num_experts", count, config.num_moe_experts
    yield "num_experts_per_tok", raw.get("num_experts_per_tok"), config.moe_router_topk
    width = raw.get("intermediate_size") if normalised else raw.get("moe_intermediate_size")
    yield "moe_intermediate_size", width, config.moe_ffn_hidden_size
    yield "norm_topk_prob", True if normalised else raw.get("norm_topk_prob"), not config.moe_router_pre_softmax
    experts = [len(layer.mlp.experts.local_experts) for layer in model.decoder.layers]
    yield "experts in every layer", count and [count] * len(experts), experts


def _head_dim(raw: Mapping[str, Any]) -> object:
    if raw.get("head_dim") is not None:
        return raw["head_dim"]
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    if hidden is None or heads is None or raw.get("model_type") in _TYPES_WITH_OWN_HEAD_DIM:
        return None
    return hidden // heads


def _windows(raw: Mapping[str, Any]) -> list[int | None] | None:
    """Return each layer's window; None where the text leaves one of the deciding keys to transformers' defaults.

    `layer_types` names the kinds of layers; Qwen's older files have two keys in its place.
    """
    window = raw.get("sliding_window")
    if raw.get("layer_types"):
        decide = ["sliding_window"] if "sliding_attention" in raw["layer_types"] else []
        windows = [window if kind == "sliding_attention" else None for kind in raw["layer_types"]]
    elif "num_hidden_layers" not in raw:
        return None
    elif raw.get("use_sliding_window"):
        decide = ["sliding_window", "max_window_layers"]
        first = raw.get("max_window_layers", 0)
        windows = [window if layer >= first else None for layer in range(raw["num_hidden_layers"])]
    else:
        everywhere = raw.get("model_type") in _TYPES_WITH_A_WINDOW_EVERYWHERE
        decide = ["sliding_window"] if everywhere else []
        windows = [window if everywhere else None] * raw["num_hidden_layers"]
    return windows if all(key in raw for key in decide) else None


def _rope(arch: Architecture, raw: Mapping[str, Any]) -> Iterator[_Compared]:
    """Compare rope settings, whose table depends on the version of transformers that wrote the file."""
    rope, built = arch.rope_parameters, dict(arch.rope_parameters.scaling)
    written = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    yield "rope_theta", written.pop("rope_theta", raw.get("rope_theta")), rope.theta
    yield "rope_type", written.pop("rope_type", written.pop("type", None)), rope.rope_type
    written.pop("type", None)
    for key, value in written.items():
        yield f"rope_scaling.{key}", tuple(value) if isinstance(value, list) else value, built.get(key)
