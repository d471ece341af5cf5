"""The modules of a layer: Transformer Engine's where it is wanted, else Megatron's own with our norm.

Core attention is ours in both, because packed rows share prompts (decision 0005 says why). So is the MLP's activation,
which keeps less for backward. Our RMS norm is there
because Megatron's torch wrapper refuses sequence parallelism; all that this needs is a mark on the weight, by which
Megatron sums its gradient over tensor-parallel ranks. Transformer Engine joins each norm with the linear map behind
it, so a norm's weight has another name there. `local_name` undoes that, and checkpoints are named alike, so that every
conversion, export and checkpoint has one set of names.

Linear maps may have low-rank adapters (LoRA, arXiv 2106.09685, section 4.1). The spec names the classes of this file
for the adapted maps; `attach` then freezes the whole model and gives each of them an A and a B (their layout:
`convert/lora.py`). Megatron's reduction and its distributed optimizer take only parameters that require a gradient, so
frozen weights have neither a gradient buffer nor moments.

Under tensor parallelism ranks exchange the low-rank values. A column-parallel map multiplies each rank's part of the
sequence by the whole A and gathers the results; a row-parallel one sums the ranks' products with their columns of A and
scatters the sum over the sequence. Either way one of the two, A or B, is the same on every rank and has seen only a
part of the sequence: it carries the mark by which Megatron sums its gradient over the ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megasharp.common.errors import UserError
from megasharp.config.policy import LoraConfig, LoraTarget, PolicyConfig
from megasharp.convert.architecture import Architecture
from megasharp.convert.lora import ADAPTER_NAMES, MODULES, Rows, input_size, merged, raised, rows_of
from megasharp.learner.attention import PackedAttention
from megasharp.learner.parallel import Place


class _Adapted(torch.nn.Module):
    """A linear map with a frozen weight, A [projections * rank, inputs] and B [outputs, rank]."""

    weight: torch.nn.Parameter
    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter
    target: LoraTarget
    rows: Rows
    scale: float
    # The dimension in which A and B are split over tensor-parallel ranks; None where they are the same on all.
    split: tuple[int | None, int | None]

    def adapt(self, target: LoraTarget, lora: LoraConfig, rows: Rows, a: Tensor) -> None:
        """Take this rank's part of A's initial values. B starts at zero, so that the model starts unchanged."""
        self.target, self.rows, self.scale = target, rows, lora.scale
        self.lora_A = torch.nn.Parameter(a.to(self.weight))
        self.lora_B = torch.nn.Parameter(self.weight.new_zeros(rows.total, lora.rank))
        for parameter, dimension in zip((self.lora_A, self.lora_B), self.split, strict=True):
            if dimension is None:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            else:
                set_tensor_model_parallel_attributes(parameter, True, dimension, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's entries, with A or B split as the weight is; gate and up are split each by itself."""
        assert metadata is not None
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        dimensions = {name: at for name, at in zip(ADAPTER_NAMES, self.split, strict=True) if at is not None}
        entries = make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in dimensions},
            prefix,
            dimensions,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.target == "fc1":
            entries = {key: apply_swiglu_sharded_factory(entry, sharded_offsets) for key, entry in entries.items()}
        return {**state, **entries}

    def merged_weight(self) -> Tensor:
        """Return this rank's part of weight + scale B A, in the weight's dtype; the weight itself is unchanged.

        Its shape is the weight's, [outputs, inputs] of this rank.
        """
        return merged(self.weight.detach(), self.lora_A.detach(), self.lora_B.detach(), self.rows, self.scale)


class AdaptedColumns(_Adapted, ColumnParallelLinear):  # type: ignore[misc]
    """The fused query-key-value map, or gate and up: outputs are split over ranks, and so are the rows of B."""

    split = (None, 0)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute Megatron's output plus scale B A x, and the bias: [..., inputs] to [..., this rank's outputs].

        With sequence parallelism the first dimension is a part of the sequence in `input_` and whole in the output.
        """
        output, bias = super().forward(input_, *args, **kwargs)
        low = F.linear(input_, self.lora_A)
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        return output + self.scale * raised(low, self.lora_B, self.rows), bias


class AdaptedRows(_Adapted, RowParallelLinear):  # type: ignore[misc]
    """The output projection, or down: inputs are split over ranks, and so are the columns of A."""

    split = (1, None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute Megatron's output plus scale B A x, and the bias: [..., this rank's inputs] to [..., outputs].

        With sequence parallelism the first dimension is a part of the sequence in the output and whole in `input_`.
        """
        output, bias = super().forward(input_)
        low = F.linear(input_, self.lora_A)
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        return output + self.scale * F.linear(low, self.lora_B), bias


# Linear layers that replace Megatron's in the layer spec.
ADAPTED: dict[LoraTarget, type[_Adapted]] = {
    "qkv": AdaptedColumns,
    "proj": AdaptedRows,
    "fc1": AdaptedColumns,
    "fc2": AdaptedRows,
}


def attach(model: GPTModel, lora: LoraConfig, arch: Architecture, place: Place, seed: int) -> None:
    """Freeze every weight and give the adapted maps their A and B, with initial values that no layout changes."""
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        for target in lora.targets:
            module = layer.get_submodule(MODULES[target])
            assert isinstance(module, _Adapted)
            tp = model.config.tensor_model_parallel_size
            rows = rows_of(target, arch, tp)
            name = f"decoder.layers.{layer.layer_number - 1}.{MODULES[target]}.lora_A"
            shape = (len(rows.sizes) * lora.rank, input_size(target, arch))
            whole = torch.empty(shape) if module.weight.is_meta else initial_values(name, seed, *shape)
            columns = whole.chunk(tp, dim=1)[place.tp] if module.split[0] == 1 else whole
            module.adapt(target, lora, rows, columns)
    config = model.config
    again = config.recompute_granularity
    if model.pre_process and (again == "full" or (again == "selective" and "mlp" in config.recompute_modules)):
        model.embedding.register_forward_hook(_ask_for_gradients)


def initial_values(name: str, seed: int, rows: int, columns: int) -> Tensor:
    """Draw the whole A: float32 [rows, columns], uniform in +-1 / sqrt(columns).

    The paper's code and PEFT draw it so (Kaiming, a = sqrt 5); section 4.1 itself says a random Gaussian.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return (torch.rand(rows, columns, generator=generator) * 2 - 1) / math.sqrt(columns)


def _ask_for_gradients(module: torch.nn.Module, args: object, output: Tensor) -> None:
    """Make the frozen embedding's output require a gradient: recomputed layers with an input without one get none."""
    if torch.is_grad_enabled():
        output.requires_grad_()


def adapted_weights(chunks: Sequence[GPTModel]) -> Iterator[tuple[torch.nn.Parameter, _Adapted]]:
    """Yield every adapted weight of this rank, and its linear map."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, _Adapted):
                yield module.weight, module


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension: x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., hidden_size]; same shape out."""
        if x.device.type == "cpu" and x.dtype == self.weight.dtype == torch.float32:
            out: Tensor = _CpuRMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
            return out
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class _RMSNormContext(FunctionCtx):
    """The attributes that forward leaves for backward."""

    saved_tensors: tuple[Tensor, Tensor]
    eps: float
    needs_input_grad: tuple[bool, ...]


class _CpuRMSNorm(torch.autograd.Function):
    """torch's norm, whose kernel has no fused backward on a CPU: by autograd it takes thirteen times a forward pass.

    Only the input is kept. With y = x / r(x), the gradient is (g w - y mean(g w y)) / r(x).
    """

    @staticmethod
    def forward(ctx: _RMSNormContext, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the normalised `x` [..., H], times `weight` [H]."""
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: _RMSNormContext, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients by `x` [..., H] and `weight` [H], None where not needed."""
        x, weight = ctx.saved_tensors
        hidden = x.shape[-1]
        inverse = x.square().mean(-1, keepdim=True).add_(ctx.eps).rsqrt_()
        normed = x * inverse
        products = (gradients[0] * normed).reshape(-1, hidden)
        by_weight = products.sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, by_weight, None
        means = torch.mv(products, weight).view_as(inverse).div_(-hidden)
        return torch.mul(gradients[0], weight).addcmul_(normed, means).mul_(inverse), by_weight, None


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
                setattr(module, _FUSES_SUM, hasattr(module.weight, "main_grad"))


def local_name(name: str) -> str:
    """Return a parameter's name in the local spec, for a name of either spec."""
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
) -> TransformerBlockSubmodules:
    """Return the spec of one chunk's layers, with our packed core attention and adapters on the `adapted` maps.

    `transformer_engine`: the maps and norms are its own; `engine_attention`: packed attention calls its kernels.
    """
    layer = _fused_layer(config, adapted) if transformer_engine else _local_layer(config)
    attention = layer.submodules.self_attention.submodules
    # Norms of keys keep the joined projection themselves: a copy of the values would come on top.
    copies = not config.qk_layernorm
    params = {"windows": windows, "by_engine": engine_attention, "copies_values": copies}
    attention.core_attention = ModuleSpec(module=PackedAttention, params=params)
    mlp = layer.submodules.mlp
    # An MLP's spec is a function with its arguments in megatron-core 0.19, a ModuleSpec before.
    maps = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    maps.activation_func = SwiGLU
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


def _local_layer(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts: TransformerLayerSubmodules = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = RMSNorm
        parts.self_attention.submodules.k_layernorm = RMSNorm
    return layer


def _fused_layer(config: TransformerConfig, adapted: Sequence[LoraTarget]) -> ModuleSpec:
    """Return Transformer Engine's layer; adapted maps are Megatron's own, without a norm, so ours is before them."""
    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    parts: TransformerLayerSubmodules = layer.submodules
    if "qkv" in adapted:
        parts.input_layernorm = RMSNorm
    if "fc1" in adapted:
        parts.pre_mlp_layernorm = RMSNorm
    parts.sharded_state_dict_keys_map = {**parts.sharded_state_dict_keys_map, **_FUSED_NORMS}
    return layer
