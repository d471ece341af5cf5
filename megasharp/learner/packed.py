"""A packed micro-batch as Megatron's layers carry it, and the move of records to a device.

Rows are packed without padding (THD). Their attention is planned on the CPU and sent to their device once per
micro-batch and window, for every layer of that window: by `block_plan` or by `flash_varlen`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megasharp.common.records import Segments
from megasharp.learner.block_plan import (
    AttentionPlan,
    cut_plan,
    full_plan,
    longest_context,
    longest_response,
    response_plan,
    spans_of,
    windowed_plan,
)
from megasharp.learner.context_parallel import ContextCut, Exchange
from megasharp.learner.flash_varlen import VarlenPlan, response_plans, varlen_plan

_Record = TypeVar("_Record")


def moved(record: _Record, device: torch.device) -> _Record:
    """Return the dataclass record with its tensors, and those of records inside it, on `device`; itself on the CPU.

    Tensors on the CPU are page-locked first, so that their copies do not wait for the GPU's work.
    """
    if device.type == "cpu":
        return record
    values = {field.name: _moved(getattr(record, field.name), device) for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    return dataclasses.replace(record, **values)  # type: ignore[type-var]


def _moved(value: object, device: torch.device) -> object:
    if isinstance(value, Tensor):
        return value.pin_memory().to(device, non_blocking=True) if value.device.type == "cpu" else value.to(device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return moved(value, device)
    return type(value)(_moved(item, device) for item in value) if isinstance(value, list | tuple) else value


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed-sequence record plus what our core attention needs.

    `segments`: the rows' runs. `cos_PF`, `sin_PF`: rotary tables at the rows' positions, F = head_dim / 2 frequencies.
    With context parallel the tables, as all else in the layers, are of this rank's rows only; `cut` numbers these among
    the `segments`' rows, and by `exchange` attention gets the other ranks' keys. `response_window`: see `block_plan`.
    `experts_PLK`: the rows' experts in each layer, where routing is replayed; integers. `is_real_P` (bool): no padding.
    """

    segments: Segments | None = None
    cos_PF: Tensor | None = None
    sin_PF: Tensor | None = None
    cut: ContextCut | None = None
    exchange: Exchange | None = None
    response_window: int | None = None
    experts_PLK: Tensor | None = None
    is_real_P: Tensor | None = None
    _plans: dict[int | None, AttentionPlan] = field(default_factory=dict, init=False, repr=False)
    _varlen_plans: dict[int | None, list[VarlenPlan]] = field(default_factory=dict, init=False, repr=False)

    def plan(self, window: int | None) -> AttentionPlan:
        """Return the blocks of a layer where a query sees `window` positions, its own included; None sees all.

        Made once, on the rows' device.
        """
        segments, rows, window, response, device = self._planned(window)
        if window not in self._plans:
            if self.cut is not None:
                plan = cut_plan(segments, window, self.cut, response)
            elif response is not None:
                plan = response_plan(segments, rows, response)
            else:
                plan = full_plan(segments, rows) if window is None else windowed_plan(segments, rows, window)
            self._plans[window] = moved(plan, device)
        return self._plans[window]

    def varlen_plans(self, window: int | None) -> list[VarlenPlan]:
        """Return the same for kernels that take stretches of queries and of keys."""
        segments, rows, window, response, device = self._planned(window)
        if window not in self._varlen_plans:
            if response is not None:
                plans = response_plans(segments, rows, response, self.cut)
            elif self.cut is None:
                plans = [varlen_plan(spans_of(segments, window), rows, window)]
            else:
                spans = spans_of(segments, window).within(self.cut.bounds, window)
                plans = [varlen_plan(spans, rows, window, self.cut.places())]
            self._varlen_plans[window] = [moved(plan, device) for plan in plans]
        return self._varlen_plans[window]

    def _planned(self, window: int | None) -> tuple[Segments, int, int | None, int | None, torch.device]:
        """Return a plan's arguments: runs, number of rows, the two windows where they hide something, the device."""
        assert self.segments is not None and self.cos_PF is not None
        hides = window is not None and window < longest_context(self.segments)
        response = self.response_window
        assert response is None or window is None, "a memory network with windows of its own is refused"
        response = response if response is not None and response < longest_response(self.segments) else None
        return self.segments, self.cos_PF.shape[0], window if hides else None, response, self.cos_PF.device


def packed_rows(
    segments: Segments,
    cos_PF: Tensor,
    sin_PF: Tensor,
    cut: ContextCut | None = None,
    exchange: Exchange | None = None,
    response_window: int | None = None,
    experts_PLK: Tensor | None = None,
    is_real_P: Tensor | None = None,
) -> PackedRows:
    """Make the record of P packed rows; `segments` are on the CPU, all else on the rotary tables' device.

    With a `cut` the tables are those of the rows that this rank holds of them.
    """
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
        cut=cut,
        exchange=exchange,
        response_window=response_window,
        experts_PLK=experts_PLK,
        is_real_P=is_real_P,
    )
