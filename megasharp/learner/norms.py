"""The norms of a layer: before attention and MLP or behind them, of each head or over all heads.

Megatron's torch wrapper refuses sequence parallelism; all that this needs is a mark on the weight, by which Megatron
sums its gradient over tensor-parallel ranks. Norms behind attention and MLP, and those over all heads, it has not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


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


class WholeRMSNorm(RMSNorm):
    """RMS norm over all heads of a token's queries, or keys, of which each tensor-parallel rank has a run.

    The weight is split as the heads are. Ranks sum squares in forward, and in backward the products that the squares'
    gradient is made of.
    """

    def __init__(self, config: TransformerConfig, heads: int) -> None:
        self.size = heads * config.kv_channels
        super().__init__(config, self.size // config.tensor_model_parallel_size, config.layernorm_epsilon)
        # Each rank sees its heads of the whole sequence.
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., this rank's heads, head_dim]; same shape out."""
        flat = x.flatten(-2)
        if flat.shape[-1] == self.size:
            return super().forward(flat).view(x.shape)
        group = parallel_state.get_tensor_model_parallel_group()
        out: Tensor = _SplitRMSNorm.apply(flat, self.weight, self.eps, self.size, group)  # type: ignore[no-untyped-call]
        return out.view(x.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's entry of the weight, split over ranks."""
        assert metadata is not None
        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        return entries


class _SplitRMSNormContext(FunctionCtx):
    """The attributes that forward leaves for backward."""

    saved_tensors: tuple[Tensor, Tensor, Tensor]
    size: int
    group: dist.ProcessGroup


class _SplitRMSNorm(torch.autograd.Function):
    """The norm of a vector that ranks have parts of; its sums are in float32 at least.

    With y = w x r and r = (sum(x^2) / size + eps)^-1/2, the gradient is r (g w - x r^2 sum(g w x) / size).
    """

    @staticmethod
    def forward(
        ctx: _SplitRMSNormContext, x: Tensor, weight: Tensor, eps: float, size: int, group: dist.ProcessGroup
    ) -> Tensor:
        """Return the normalised `x` [..., this rank's part of size], times `weight`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True)
        dist.all_reduce(squares, group=group)
        inverse = squares.div_(size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.size, ctx.group = size, group
        return (wide * inverse * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SplitRMSNormContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients by `x` and `weight`; the others have none."""
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse
        products = gradients[0] * normed
        by_weight = products.flatten(0, -2).sum(0).to(weight.dtype)
        means = (products * weight).sum(-1, keepdim=True)
        dist.all_reduce(means, group=ctx.group)
        by_x = (gradients[0] * weight - normed * means.div_(ctx.size)) * inverse
        return by_x.to(x.dtype), by_weight, None, None, None


class WholeNormAttention(SelfAttention):  # type: ignore[misc]
    """Attention with a norm over all heads of the queries and one over those of the keys, before they are rotated.

    They are not Megatron's own two norms: by their names it sums gradients over tensor-parallel ranks, each of which
    has the weights of its own heads here.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.q_norm = WholeRMSNorm(config, config.num_attention_heads)
        self.k_norm = WholeRMSNorm(config, config.num_query_groups)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return Megatron's queries [P, 1, heads, head_dim] and keys, normed, and its values."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        return self.q_norm(query), self.k_norm(key), value


class NormedAdd(torch.nn.Module):
    """The norm behind attention or the MLP, in place of Megatron's bias-dropout-add: residual + norm(output)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        """Return the function of (output, bias), residual and dropout that Megatron calls; only two are there."""
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        assert bias is None and dropout == 0.0
        # Megatron calls this with gradients on, even where they are off around the layer: what the norm keeps for
        # backward would then stay until the last layer.
        with torch.set_grad_enabled(output.requires_grad):
            normed: Tensor = self.norm(output)
            return residual + normed
