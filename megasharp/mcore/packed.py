"""A packed micro-batch as Megatron's layers carry it.

Rows are packed without padding (THD); by which blocks attention gathers and scatters them, `blocks` plans: once per
micro-batch and window, for every layer of that window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megasharp.mcore.blocks import AttentionPlan, full_plan, longest_context, windowed_plan
from megasharp.mcore.moving import moved
from megasharp.types import Segments


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed-sequence record plus what our core attention needs.

    `segments`: the rows' runs. `cos_PF`, `sin_PF`: rotary tables at the rows' positions, F = head_dim / 2 frequencies.
    """

    segments: Segments | None = None
    cos_PF: Tensor | None = None
    sin_PF: Tensor | None = None
    _plans: dict[int | None, AttentionPlan] = field(default_factory=dict, init=False, repr=False)

    def plan(self, window: int | None) -> AttentionPlan:
        """How rows attend in a layer where a query sees `window` positions, its own included; None sees all."""
        assert self.segments is not None and self.cos_PF is not None
        if window is not None and window >= longest_context(self.segments):
            window = None
        if window not in self._plans:
            rows = self.cos_PF.shape[0]
            plan = full_plan(self.segments, rows) if window is None else windowed_plan(self.segments, rows, window)
            self._plans[window] = moved(plan, self.cos_PF.device)
        return self._plans[window]


def packed_rows(segments: Segments, cos_PF: Tensor, sin_PF: Tensor) -> PackedRows:
    """The record of P packed rows; `segments` are on the CPU, all else on the rotary tables' device."""
    ends = torch.cumsum(segments.length, 0).to(torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), ends]).to(cos_PF.device)
    longest = int(segments.length.max())
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        segments=segments,
        cos_PF=cos_PF,
        sin_PF=sin_PF,
    )
