"""Context parallelism: the packed tokens of a micro-batch, its rows, are cut over ranks; attention alone sees them all.

The rows are cut into 2 * size chunks, and rank r computes chunks r and 2 * size - 1 - r (a zigzag): late rows of a long
run see many keys and early rows few, so every rank gets some of both (arXiv 2407.21783, section 3.3.2). Inside core
attention every rank gathers the keys and values of all ranks, and backward sums their gradients over ranks and gives
each its own (reduce-scatter). A ring of sends would hide more of the exchange, but it would need the softmax in parts,
which windows and shared prompts cut unevenly; gathering is exact for both, and with grouped queries keys and values are
a fraction of the queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextCut:
    """The share of rank number `rank` of `size` in `rows` packed rows, a multiple of 2 * `size`."""

    rank: int
    size: int
    rows: int

    def __post_init__(self) -> None:
        assert self.rows % (2 * self.size) == 0, f"{self.rows} rows are not cut evenly over {self.size} ranks"

    @property
    def bounds(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """This rank's two chunks in its order: packed rows from the first (included) to the end."""
        chunk = self.rows // (2 * self.size)
        first, second = (chunk * number for number in (self.rank, 2 * self.size - 1 - self.rank))
        return (first, first + chunk), (second, second + chunk)

    def held(self) -> Tensor:
        """Return the packed rows of this rank, in its order: int64 [rows / size]."""
        return torch.cat([torch.arange(first, end) for first, end in self.bounds])

    def own_places(self) -> Tensor:
        """Return each packed row's index among this rank's own rows: int64 [rows], 0 for rows of other ranks."""
        local_P = torch.zeros(self.rows, dtype=torch.int64)
        local_P[self.held()] = torch.arange(self.rows // self.size)
        return local_P

    def places(self) -> Tensor:
        """Return each packed row's index among the ranks' rows, joined in the ranks' order: int64 [rows]."""
        joined = torch.cat([ContextCut(rank, self.size, self.rows).held() for rank in range(self.size)])
        return joined.argsort()


class Exchange(Protocol):
    """Collectives between the ranks of one cut."""

    def gather(self, rows: Tensor) -> Tensor:
        """Gather [L, ...] of every rank into [size * L, ...], in the ranks' order."""

    def scatter_sum(self, rows: Tensor) -> Tensor:
        """Sum over ranks what each has for this rank's rows: [size * L, ...] -> [L, ...]."""


@dataclass(frozen=True, slots=True)
class GroupExchange:
    """Satisfies `Exchange` over a process group of more than one rank."""

    group: dist.ProcessGroup

    def gather(self, rows: Tensor) -> Tensor:
        """Gather by one all-gather."""
        size = dist.get_world_size(self.group)
        whole = rows.new_empty(size * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(whole, rows.contiguous(), group=self.group)
        return whole

    def scatter_sum(self, rows: Tensor) -> Tensor:
        """Sum by one reduce-scatter."""
        size = dist.get_world_size(self.group)
        own = rows.new_empty(rows.shape[0] // size, *rows.shape[1:])
        dist.reduce_scatter_tensor(own, rows.contiguous(), group=self.group)
        return own


def all_rows(rows: Tensor, exchange: Exchange) -> Tensor:
    """Gather all ranks' rows [L, ...] into [size * L, ...]; backward sums gradients over ranks, keeps its own."""
    whole: Tensor = _AllRows.apply(rows, exchange)  # type: ignore[no-untyped-call]
    return whole


class _Context(torch.autograd.function.FunctionCtx):
    """State that forward leaves for backward."""

    exchange: Exchange


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, rows: Tensor, exchange: Exchange) -> Tensor:
        """Gather each rank's `rows` [L, ...] into [size * L, ...], in the ranks' order."""
        ctx.exchange = exchange
        return exchange.gather(rows)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient by this rank's rows, [L, ...]: the sum over ranks of their [size * L, ...]."""
        return ctx.exchange.scatter_sum(gradients[0]), None
