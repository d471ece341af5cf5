"""A packed micro-batch as Megatron's layers carry it: the plan by which attention gathers and scatters rows.

Rows are packed without padding (THD). Attention itself runs on blocks of similar runs, padded inside the block only;
runs that continue a shared prompt see the prompt's keys too. The plan is made once per micro-batch and used by every
layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megasharp.types import Segments


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Runs attended together. B runs, Q and K the longest run's queries and keys.

    `query_BQ`, `key_BK`: packed rows (int64; padding repeats row 0). `mask_BQK`: True where a query sees a key, or
    None where plain causal attention over equal queries and keys says the same.
    """

    query_BQ: Tensor
    key_BK: Tensor
    mask_BQK: Tensor | None


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed-sequence record plus what our core attention needs.

    `restore_P`: for each packed row, where its output lies in the blocks' concatenated padded outputs.
    `cos_PF`, `sin_PF`: rotary tables at the rows' positions, F = head_dim / 2 frequencies.
    """

    blocks: list[Block] = field(default_factory=list)
    restore_P: Tensor | None = None
    cos_PF: Tensor | None = None
    sin_PF: Tensor | None = None


def packed_rows(segments: Segments, num_rows: int, cos_PF: Tensor, sin_PF: Tensor) -> PackedRows:
    """Plan attention over `num_rows` packed rows."""
    blocks: list[Block] = []
    restore_P = torch.full((num_rows,), -1, dtype=torch.int64)
    offset = 0
    for runs in _similar_runs(segments):
        block, valid_BQ = _block(segments, runs)
        slots_BQ = torch.arange(offset, offset + valid_BQ.numel()).view_as(valid_BQ)
        restore_P[block.query_BQ[valid_BQ]] = slots_BQ[valid_BQ]
        offset += valid_BQ.numel()
        blocks.append(block)
    assert bool((restore_P >= 0).all()), "every packed row belongs to exactly one run"
    ends = torch.cumsum(segments.length, 0).to(torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    longest = int(segments.length.max())
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        blocks=blocks,
        restore_P=restore_P,
        cos_PF=cos_PF,
        sin_PF=sin_PF,
    )


def _similar_runs(segments: Segments) -> list[Tensor]:
    """Indices of runs, grouped by having a prefix and by the next power of two of their length.

    Bounding the spread of lengths inside a block bounds its padding to less than half.
    """
    octave = torch.ceil(torch.log2(segments.length.clamp(min=1).to(torch.float64))).to(torch.int64)
    kind = octave * 2 + (segments.prefix >= 0)
    return [torch.nonzero(kind == value)[:, 0] for value in torch.unique(kind)]


def _grid(start_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B, longest] counted from each start, and which of them are real; padding points at row 0."""
    steps = torch.arange(int(length_B.max()) if length_B.numel() else 0)
    valid = steps[None] < length_B[:, None]
    return torch.where(valid, start_B[:, None] + steps[None], 0), valid


def _block(segments: Segments, runs: Tensor) -> tuple[Block, Tensor]:
    query_BQ, valid_BQ = _grid(segments.start[runs], segments.length[runs])
    prefix_B = segments.prefix[runs]
    if int(prefix_B[0]) < 0:
        # Padded keys follow every real query of their run, so the causal mask already hides them.
        return Block(query_BQ, query_BQ, None), valid_BQ
    before_BK, seen_BK = _grid(segments.start[prefix_B], segments.length[prefix_B])
    queries = query_BQ.shape[1]
    causal_QQ = torch.ones(queries, queries, dtype=torch.bool).tril()
    mask_BQK = torch.cat([seen_BK[:, None].expand(-1, queries, -1), causal_QQ[None].expand(len(runs), -1, -1)], dim=2)
    return Block(query_BQ, torch.cat([before_BK, query_BQ], dim=1), mask_BQK), valid_BQ
