"""Linear maps and norms in plain torch, with the parameters, marks and communication of the real ones.

Sizes are whole; a map keeps its tensor-parallel part. Activations are [rows, batch, hidden].
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class _Module(torch.nn.Module):
    def get_extra_state(self) -> Tensor:
        """What delayed scaling would remember: nothing."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Accepts nothing, in either form."""
        assert state is None or state.numel() == 0


class RMSNorm(_Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        size = hidden_size if normalized_shape is None else normalized_shape
        assert size is not None
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """As it says."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class LayerNorm(_Module):
    """Inherited from at import, never built."""


class DotProductAttention(_Module):
    """Attention of packed stretches ("thd") of queries and keys, whose causal mask and window end with the keys."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        attention_type: str = "self",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert (qkv_format, attn_mask_type, attention_dropout) == ("thd", "padding_causal_bottom_right", 0.0)
        self.sizes = num_attention_heads, num_gqa_groups or num_attention_heads, kv_channels
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        qkv_format: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        attn_mask_type: str,
        window_size: tuple[int, int],
        pad_between_seqs: bool,
    ) -> Tensor:
        """Return [t, heads * channels] of [t, heads, channels]; keys and values are [keys, groups, channels]."""
        heads, groups, channels = self.sizes
        assert query_layer.shape[1:] == (heads, channels) and key_layer.shape[1:] == (groups, channels)
        assert (qkv_format, attn_mask_type, pad_between_seqs) == ("thd", "padding_causal_bottom_right", False)
        assert cu_seqlens_q.dtype is cu_seqlens_kv.dtype is torch.int32 and window_size[1] == 0
        keys, values = (x.repeat_interleave(heads // groups, dim=1) for x in (key_layer, value_layer))
        outs = []
        starts = zip(cu_seqlens_q.tolist(), cu_seqlens_kv.tolist(), strict=True)
        for (query, key), (query_end, key_end) in pairwise(starts):
            length, seen = query_end - query, key_end - key
            assert length <= max_seqlen_q and seen <= max_seqlen_kv
            distance = torch.arange(length)[:, None] + seen - length - torch.arange(seen)
            hidden = (distance < 0) | (distance > (window_size[0] if window_size[0] >= 0 else seen))
            scores = torch.einsum("qhd,khd->hqk", query_layer[query:query_end], keys[key:key_end]) * self.scale
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, values[key:key_end]))
        return torch.cat(outs).flatten(1)


class _Product(torch.autograd.Function):
    """x W^T, whose backward adds the weight's gradient to `main_grad`, as the real kernel does, and returns a dummy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (out,) = gradients
        buffer = ctx.parameter.main_grad
        buffer.add_(out.flatten(0, -2).to(buffer.dtype).t() @ x.flatten(0, -2).to(buffer.dtype))
        ctx.parameter.grad_added_to_main_grad = True
        return out @ weight, torch.full_like(weight, torch.nan)


class Linear(_Module):
    """Column- or row-parallel, with sequence parallelism in front or behind."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        device: Any = None,
        **unused: object,
    ) -> None:
        super().__init__()
        assert not return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.parallel_mode, self.tp_size, self.tp_group = parallel_mode, tp_size, tp_group
        self.tp_rank = dist.get_rank(tp_group) if tp_group is not None else 0
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.use_bias, self.sequence_parallel = bias, sequence_parallel and tp_size > 1
        self._before_weight(params_dtype, device)
        shape = (self.out_features, self.in_features)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype)) if bias else None
        self._mark(self.weight, 0 if parallel_mode == "column" else 1)
        if self.bias is not None and parallel_mode == "column":
            self._mark(self.bias, 0)

    def _before_weight(self, params_dtype: torch.dtype, device: Any) -> None:
        """Where the map with a norm has the norm's weight."""

    def _mark(self, parameter: torch.nn.Parameter, dimension: int) -> None:
        values = {"tensor_model_parallel": True, "partition_dim": dimension, "partition_stride": 1}
        for name, value in values.items():
            setattr(parameter, name, value)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """The product, with what ranks exchange before or after it."""
        from megatron.core.tensor_parallel import mappings

        group = self.tp_group
        if self.parallel_mode == "column" and self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=group)
        elif self.parallel_mode == "column":
            x = mappings.copy_to_tensor_model_parallel_region(x, group=group)
        if self.fuse_wgrad_accumulation:
            out = _Product.apply(x, self.weight) if self.bias is None else _Product.apply(x, self.weight) + self.bias
        else:
            out = F.linear(x, self.weight, self.bias)
        if self.parallel_mode == "row" and self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=group)
        if self.parallel_mode == "row":
            return mappings.reduce_from_tensor_model_parallel_region(out, group=group)
        return out


class GroupedLinear(_Module):
    """One map for each expert, of whole weights: ranks exchange nothing here, and a map takes its own rows."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        fuse_wgrad_accumulation: bool = False,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        device: Any = None,
        **unused: object,
    ) -> None:
        super().__init__()
        assert not bias and not return_bias and tp_size == 1
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.fp8, self.fp8_calibration, self.fp8_meta = False, False, {"fp8_checkpoint": False}
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
            setattr(self, f"weight{number}", weight)

    def init_fp8_metadata(self, num_gemms: int) -> None:
        """Make nothing: there is no FP8."""

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        """Each run of rows times its expert's weight."""
        product = _Product.apply if self.fuse_wgrad_accumulation else F.linear
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return torch.cat([product(rows, weight) for rows, weight in zip(x.split(m_splits), weights, strict=True)])


class LayerNormLinear(Linear):
    """A norm and the column-parallel map behind it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        assert normalization == "RMSNorm" and not return_layernorm_output and not zero_centered_gamma
        self._eps = eps
        super().__init__(in_features, out_features, **options)

    def _before_weight(self, params_dtype: torch.dtype, device: Any) -> None:
        weight = torch.nn.Parameter(torch.ones(self.in_features, dtype=params_dtype, device=device))
        weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_weight = weight

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Norm, then the product."""
        x = F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self._eps)
        return super().forward(x, is_first_microbatch)
