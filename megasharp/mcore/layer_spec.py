"""Which modules a layer is made of: Transformer Engine's where it is wanted, else Megatron's own and our norm.

Core attention is ours in both, because packed rows share prompts (the README of this house says why). Transformer
Engine joins each norm with the linear map behind it, so a norm's weight has another name there; `local_name` undoes
it, and checkpoints are named alike, so that every conversion, export and checkpoint knows one set of names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import util
from typing import Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megasharp.convert.lora import Target
from megasharp.errors import UserError
from megasharp.mcore.attention import PackedAttention
from megasharp.mcore.lora import ADAPTED
from megasharp.mcore.norm import RMSNorm

Wanted = bool | Literal["auto"]

# A norm's module in the local spec, and what Transformer Engine's fused map calls its parameters.
_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def transformer_engine_is_there() -> bool:
    """Whether this Python has Transformer Engine; nothing is imported."""
    return util.find_spec("transformer_engine") is not None


def uses_transformer_engine(wanted: Wanted, device: torch.device) -> bool:
    """Whether layers are Transformer Engine's: with `auto` on a GPU where it is installed.

    Raises:
        UserError: it is wanted and not installed.
    """
    if wanted == "auto":
        return device.type == "cuda" and transformer_engine_is_there()
    if wanted:
        require_transformer_engine("policy.transformer_engine=true", "leave it at auto")
    return wanted


def require_transformer_engine(key: str, otherwise: str) -> None:
    """Raise UserError, in one line from `key` to what to do `otherwise`, where Transformer Engine is not installed."""
    if not transformer_engine_is_there():
        raise UserError(
            f"{key} needs Transformer Engine, which this Python has not: pip install "
            f"'transformer-engine[pytorch,core_cu13]', or {otherwise}"
        )


def local_name(name: str) -> str:
    """A parameter's name in the local spec, whichever spec `name` is of."""
    for norm, fused in _FUSED_NORMS.items():
        if fused in name:
            return name.replace(fused, norm)
    return name


def layers(
    config: TransformerConfig,
    windows: tuple[int | None, ...],
    chunk: int | None,
    adapted: Sequence[Target],
    transformer_engine: bool,
) -> TransformerBlockSubmodules:
    """The layers of one chunk, with our packed core attention, and room for adapters on the `adapted` maps."""
    layer = _fused_layer(config, adapted) if transformer_engine else _local_layer(config)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=PackedAttention, params={"windows": windows})
    for target in adapted:
        home = attention if target in ("qkv", "proj") else _linear_maps(layer.submodules.mlp)
        setattr(home, f"linear_{target}", ADAPTED[target])
    count = get_num_layers_to_build(config, vp_stage=chunk)
    final = _engine_norm() if transformer_engine else RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=final)


def _local_layer(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts: TransformerLayerSubmodules = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = RMSNorm
        parts.self_attention.submodules.k_layernorm = RMSNorm
    return layer


def _fused_layer(config: TransformerConfig, adapted: Sequence[Target]) -> ModuleSpec:
    """Transformer Engine's; before an adapted map, which is Megatron's own and has no norm, stands our norm."""
    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    parts: TransformerLayerSubmodules = layer.submodules
    if "qkv" in adapted:
        parts.input_layernorm = RMSNorm
    if "fc1" in adapted:
        parts.pre_mlp_layernorm = RMSNorm
    parts.sharded_state_dict_keys_map = {**parts.sharded_state_dict_keys_map, **_FUSED_NORMS}
    return layer


def _engine_norm() -> Callable[..., torch.nn.Module]:
    from megatron.core.extensions.transformer_engine import TENorm

    norm: Callable[..., torch.nn.Module] = TENorm
    return norm


def _linear_maps(mlp: ModuleSpec | partial[object]) -> object:
    """The classes of an MLP's linear maps; megatron-core 0.19 has a function with its arguments as an MLP's spec."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
