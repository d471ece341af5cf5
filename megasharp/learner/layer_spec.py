"""The modules of a layer: Transformer Engine's where it is wanted, else Megatron's own with our norm.

Core attention is ours in both, because packed rows share prompts (decision 0005 says why). So are the MLP's activation,
which keeps less for backward, and a mixture's routers. Transformer Engine joins each norm with the linear map behind
it, so a norm's weight has another name there, and numbers its grouped experts. `local_name` undoes that, and
checkpoints are named alike, so that every conversion, export and checkpoint has one set of names. Norms behind
attention and MLP, and those over all heads, are ours in both, and Transformer Engine's maps then begin without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megasharp.common.errors import UserError
from megasharp.config.policy import LoraTarget, PolicyConfig
from megasharp.learner.adapters import ADAPTED
from megasharp.learner.attention import PackedAttention
from megasharp.learner.norms import NormedAdd, RMSNorm, WholeNormAttention
from megasharp.learner.routers import GroupedExperts, Router, groups_products


class SwiGLU(torch.nn.Module):
    """The MLP's activation without a GPU, silu(gate) * up (arXiv 2002.05202), of gate and up side by side.

    Megatron's own in torch keeps three tensors for backward: gate's activation and a copy of up beside its input. This
    one keeps its input and computes gate's activation again: three of ffn numbers a token less.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., 2 * ffn] to [..., ffn]."""
        out: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
        return out

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Return nothing: Megatron's MLP asks every part of it for its entries."""
        return {}


class _SwiGLUContext(FunctionCtx):
    """The attributes that forward leaves for backward."""

    saved_tensors: tuple[Tensor]


class _SwiGLU(torch.autograd.Function):
    """Outputs and gradients are those of `F.silu(gate) * up` by autograd, bit for bit: the same operators in order."""

    @staticmethod
    def forward(ctx: _SwiGLUContext, x: Tensor) -> Tensor:
        """Return silu(gate) * up, [..., ffn] of [..., 2 * ffn]."""
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SwiGLUContext, *gradients: Tensor) -> Tensor:
        """Return the gradient by gate and up, side by side; what leads to them is computed in gate's place."""
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        by_x = torch.empty_like(x)
        by_gate, by_up = by_x.chunk(2, dim=-1)
        torch.mul(gradients[0], torch.ops.aten.silu.out(gate, out=by_gate), out=by_up)
        torch.mul(gradients[0], up, out=by_gate)
        torch.ops.aten.silu_backward.grad_input(by_gate, gate, grad_input=by_gate)
        return by_x


# A norm's module in the local spec, and what Transformer Engine's fused map calls its parameters.
_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


# Transformer Engine's grouped experts number the weights of their two maps.
_GROUPED_EXPERT = re.compile(r"(?P<experts>.*\.experts\.)(?P<map>linear_fc[12])\.weight(?P<number>\d+)$")

# An attribute of Transformer Engine's maps, which they read in each pass.
_FUSES_SUM = "fuse_wgrad_accumulation"


def transformer_engine_is_there() -> bool:
    """Return True where this Python has Transformer Engine, without importing it."""
    return util.find_spec("transformer_engine") is not None


def uses_transformer_engine(policy: PolicyConfig, device: torch.device) -> bool:
    """Decide whether layers are Transformer Engine's: with FP8 always, with `auto` on a GPU where it is installed.

    Raises UserError where it is wanted and not installed.
    """
    wanted = policy.transformer_engine if policy.fp8 is None else True
    if wanted == "auto":
        return device.type == "cuda" and transformer_engine_is_there()
    if wanted:
        require_transformer_engine("policy.transformer_engine=true", "leave it at auto")
    return wanted


def require_transformer_engine(key: str, otherwise: str) -> None:
    """Raise UserError, in one line from `key` to what to do `otherwise`, where Transformer Engine is not installed."""
    if not transformer_engine_is_there():
        raise UserError(
            f"{key} needs Transformer Engine, which this Python has not: use that of `make gpu`, or {otherwise}"
        )


def fuse_gradient_sums(chunks: Sequence[torch.nn.Module]) -> None:
    """Let Transformer Engine's maps add a weight's gradient to Megatron's buffer `main_grad` in the matrix product.

    The gradient then never exists in the weights' dtype. Call it after Megatron's wrapper has made the buffers; weights
    without one, which are frozen, stay as they are.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, _FUSES_SUM):
                weights = module.parameters(recurse=False)
                setattr(module, _FUSES_SUM, any(hasattr(weight, "main_grad") for weight in weights))


def local_name(name: str) -> str:
    """Return a parameter's name in the local spec, for a name of either spec."""
    grouped = _GROUPED_EXPERT.match(name)
    if grouped is not None:
        return f"{grouped['experts']}local_experts.{grouped['number']}.{grouped['map']}.weight"
    for norm, fused in _FUSED_NORMS.items():
        if fused in name:
            return name.replace(fused, norm)
    return name


def layers(
    config: TransformerConfig,
    windows: tuple[int | None, ...],
    chunk: int | None,
    adapted: Sequence[LoraTarget],
    transformer_engine: bool,
    engine_attention: bool,
    post_norm: bool,
    qk_norm_whole: bool,
) -> TransformerBlockSubmodules:
    """Return the spec of one chunk's layers, with our packed core attention and adapters on the `adapted` maps.

    `transformer_engine`: the maps and norms are its own; `engine_attention`: packed attention calls its kernels;
    `post_norm` and `qk_norm_whole` are the architecture's.
    """
    layer = _fused_layer(config, adapted) if transformer_engine else _local_layer(config)
    attention = layer.submodules.self_attention.submodules
    # Norms of keys keep the joined projection themselves: a copy of the values would come on top.
    copies = not config.qk_layernorm
    params = {"windows": windows, "by_engine": engine_attention, "copies_values": copies}
    attention.core_attention = ModuleSpec(module=PackedAttention, params=params)
    maps = _submodules(layer.submodules.mlp)
    if config.num_moe_experts:
        maps.router = Router
        _submodules(maps.experts).activation_func = SwiGLU
        if not transformer_engine and groups_products(config):
            spec = partial if isinstance(maps.experts, partial) else ModuleSpec
            maps.experts = spec(GroupedExperts, submodules=_submodules(maps.experts))
    else:
        maps.activation_func = SwiGLU
    if post_norm:
        _put_norms_behind(layer.submodules, attention, maps, config, transformer_engine)
    if qk_norm_whole:
        layer.submodules.self_attention.module = WholeNormAttention
    for target in adapted:
        home = attention if target in ("qkv", "proj") else maps
        setattr(home, f"linear_{target}", ADAPTED[target])
    count = get_num_layers_to_build(config, vp_stage=chunk)
    final: Callable[..., torch.nn.Module] = RMSNorm
    if transformer_engine:
        # Not every Python has it.
        from megatron.core.extensions.transformer_engine import TENorm

        final = TENorm
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=final)


def _submodules(spec: Any) -> Any:
    """Return the parts of an MLP's spec: a function with its arguments in megatron-core 0.19, a ModuleSpec before."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def _local_layer(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts: TransformerLayerSubmodules = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = RMSNorm
        parts.self_attention.submodules.k_layernorm = RMSNorm
    return layer


def _fused_layer(config: TransformerConfig, adapted: Sequence[LoraTarget]) -> ModuleSpec:
    """Return Transformer Engine's layer; adapted maps are Megatron's own, without a norm, so ours is before them."""
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm
    )
    parts: TransformerLayerSubmodules = layer.submodules
    if "qkv" in adapted:
        parts.input_layernorm = RMSNorm
    if "fc1" in adapted:
        parts.pre_mlp_layernorm = RMSNorm
    parts.sharded_state_dict_keys_map = {**parts.sharded_state_dict_keys_map, **_FUSED_NORMS}
    return layer


def _put_norms_behind(
    parts: TransformerLayerSubmodules, attention: Any, maps: Any, config: TransformerConfig, transformer_engine: bool
) -> None:
    """Take the norms before attention and MLP out of a layer's spec, and norm what both compute instead."""
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    parts.self_attn_bda = parts.mlp_bda = ModuleSpec(NormedAdd, params={"config": config})
    if transformer_engine:
        # Not every Python has it. The spec's own maps begin with a norm.
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        attention.linear_qkv = maps.linear_fc1 = TEColumnParallelLinear
