"""Core attention on packed rows, brought into Megatron through the layer spec.

Megatron's own DotProductAttention refuses packed sequences. `PackedAttention` applies the rotary embedding at the rows'
own positions, with grouped queries. A layer may have a window: then a query sees only that many positions, its own
included. `attend` chooses between the ways to compute the rest: kernels for variable lengths, or padded blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megasharp.learner import flash_varlen
from megasharp.learner.context_parallel import all_rows
from megasharp.learner.engine_attention import engine_attention
from megasharp.learner.packed import PackedRows


def rotary_tables(inverse_frequency: Tensor, scaling: float, positions_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [P, head_dim / 2], of each position; both halves of a head share the frequencies.

    `inverse_frequency` [head_dim / 2] and `scaling` are transformers' own rules for the model (llama3, yarn, ...).
    """
    angles = torch.outer(positions_P.to(torch.float32), inverse_frequency.to(positions_P.device))
    return angles.cos() * scaling, angles.sin() * scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [P, heads, head_dim] by position (RoPE, arXiv 2104.09864); `cos`, `sin` are [P, head_dim / 2].

    The dtype of `x` stays. Differentiable by `x` alone.
    """
    rotated: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _RotationContext(FunctionCtx):
    """The attributes that forward leaves for backward."""

    saved_tensors: tuple[Tensor, Tensor]


class _Rotation(torch.autograd.Function):
    """The rotation and its gradient, which is the rotation by the opposite angle: no temporaries are kept."""

    @staticmethod
    def forward(ctx: _RotationContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x` [P, heads, head_dim] by `cos` and `sin` [P, head_dim / 2]; same shape and dtype out."""
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: _RotationContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient by `x`, [P, heads, head_dim] as the gradient that comes in; none by `cos` and `sin`."""
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    # Element i is turned with element i + head_dim / 2, as in transformers' models, not with its neighbour.
    first, second = x.chunk(2, dim=-1)
    turned = x.new_empty(x.shape)
    # One product over whole heads reads and writes memory in a row, where that of a half steps over the other half.
    torch.mul(x, torch.cat((cos, cos), dim=-1), out=turned)
    out_first, out_second = turned.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return turned


class PackedAttention(torch.nn.Module):
    """Causal attention of [P, heads, head_dim] queries over [P, groups, head_dim] keys and values.

    `layer_number` counts from 1 over the whole model; `windows` is the architecture's. `by_engine`: Transformer Engine
    attends. With `copies_values` the values are copied out of the joined projection, which backward would keep whole
    for them. The other arguments are those that Megatron gives every core attention.
    """

    def __init__(
        self,
        config: object,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        windows: tuple[int | None, ...] = (),
        by_engine: bool = False,
        copies_values: bool = False,
        **unused: object,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.window = windows[layer_number - 1] if windows else None
        self.by_engine = by_engine
        self.copies_values = copies_values

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        """Return [P, heads * head_dim]. Megatron's mask arguments are not used: the rows' plan rules."""
        rows = packed_seq_params
        assert rows is not None and rows.cos_PF is not None and rows.sin_PF is not None
        query, key = rotate(query, rows.cos_PF, rows.sin_PF), rotate(key, rows.cos_PF, rows.sin_PF)
        value = value.contiguous() if self.copies_values else value
        return attend(query, key, value, rows, self.window, self.softmax_scale, self.by_engine)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    window: int | None,
    scale: float | None,
    by_engine: bool = False,
) -> Tensor:
    """Return [P, heads * head_dim], by the kernels for variable lengths where they can, else block by block.

    Queries [P, heads, head_dim], keys and values [P, groups, head_dim], rotated already; `scale` None is
    head_dim^-0.5. Blocks are torch's scaled-dot-product attention on similar runs, padded (see `block_plan`): on CPUs,
    and in float32. `by_engine`: by Transformer Engine, and by nothing else.
    """
    if by_engine:
        (plan,) = rows.varlen_plans(window)
        return engine_attention(query, key, value, plan, scale, rows.exchange)
    if flash_varlen.supports(query):
        varlen = rows.varlen_plans(window)
        return flash_varlen.varlen_attention(query, key, value, varlen, scale, rows.exchange).flatten(1)
    if rows.exchange is not None:
        key, value = all_rows(key, rows.exchange), all_rows(value, rows.exchange)
    blocks = rows.plan(window)
    # torch's kernel for CPUs reads a key head for all of its query heads; others would repeat it.
    grouped = query.device.type == "cpu"
    repeat = 1 if grouped else query.shape[1] // key.shape[1]
    # Padded queries are computed, too, and dropped by `restore_P`.
    outputs = []
    for block in blocks.blocks:
        out = F.scaled_dot_product_attention(
            _gather(query, block.query_BQ, 1),
            _gather(key, block.key_BK, repeat),
            _gather(value, block.key_BK, repeat),
            attn_mask=None if block.mask_BQK is None else block.mask_BQK[:, None],
            is_causal=block.mask_BQK is None,
            scale=scale,
            enable_gqa=grouped,
        )
        # [B, heads, Q, head_dim], padding included, to rows.
        outputs.append(out.transpose(1, 2).reshape(block.query_BQ.numel(), -1))
    return torch.cat(outputs).index_select(0, blocks.restore_P)


def _gather(x: Tensor, rows_BL: Tensor, repeat: int) -> Tensor:
    """Gather [P, h, d] -> [B, h * repeat, L, d]: each key head serves `repeat` neighbouring query heads."""
    gathered = x.index_select(0, rows_BL.reshape(-1)).view(*rows_BL.shape, *x.shape[1:])
    return gathered.repeat_interleave(repeat, dim=2).transpose(1, 2) if repeat > 1 else gathered.transpose(1, 2)
