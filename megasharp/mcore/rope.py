"""Rotary position embedding at given positions, with transformers' own frequency rules (llama3, yarn, ... scaling)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def rotary_tables(inverse_frequency: Tensor, scaling: float, positions_P: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [P, head_dim / 2], of each position; both halves of a head share the frequencies."""
    angles = torch.outer(positions_P.to(torch.float32), inverse_frequency.to(positions_P.device))
    return angles.cos() * scaling, angles.sin() * scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotation to [P, heads, head_dim]; `cos`, `sin` are [P, head_dim / 2]."""
    rotated: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _RotationContext(FunctionCtx):
    """What backward needs."""

    saved_tensors: tuple[Tensor, Tensor]


class _Rotation(torch.autograd.Function):
    """The rotation and its gradient, which is the rotation by the opposite angle: no temporaries are kept."""

    @staticmethod
    def forward(ctx: _RotationContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: _RotationContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_first, out_second = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return turned
