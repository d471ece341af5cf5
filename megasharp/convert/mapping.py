"""Rules that cut one Megatron parameter out of Hugging Face tensors, and join it back into them.

Each kind of rule knows one layout; the families' tables say which parameters follow it. Cutting and joining only copy
bytes, so a round trip is bit-exact in every dtype. Layouts: Megatron-core's `ColumnParallelLinear`,
`RowParallelLinear`, `VocabParallelEmbedding` and `SelfAttention.get_query_key_value_tensors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megasharp.convert.architecture import Architecture, Dimension


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of a tensor-parallel parameter: `rank` of `count`; `vocab_multiple` is padded_vocab's."""

    rank: int
    count: int
    vocab_multiple: int = 1

    def rows_of(self, total: int) -> tuple[int, int]:
        """Return (first, length) of this part when `total` items are cut into equal runs."""
        assert total % self.count == 0, f"{total} items in {self.count} parts"
        length = total // self.count
        return self.rank * length, length


@dataclass(frozen=True, slots=True)
class View:
    """A contiguous part of a whole tensor in a rank's parameter: from index `start` on in dimension `dim`.

    `number` is that of the rule's Hugging Face tensor; all other dimensions are whole.
    """

    number: int
    dim: int
    start: int
    values: Tensor


def always(_: Architecture) -> bool:
    """Return True: the parameter exists in every model of the family."""
    return True


def padded_vocab(vocab: int, tp: int, multiple: int = 1) -> int:
    """Return the smallest vocabulary size >= `vocab` that `tp` ranks hold in equal multiples of `multiple` rows.

    Example: `padded_vocab(151_936, tp=8, multiple=128)` is 152_576, 19_072 rows a rank.
    """
    step = tp * multiple
    return -(-vocab // step) * step


@dataclass(frozen=True)
class Rule(ABC):
    """One parameter: its Megatron name, its Hugging Face name(s) and their symbolic shapes.

    `{layer}` in a name stands for the global layer number, `{expert}` for the expert's; there is a parameter for each.
    Ranks of expert tensor parallelism share an expert. `aliases` are further Megatron names of the same tensor, `when`
    says which architectures have the parameter, and `exported` is False for a copy that only
    Megatron holds of a tensor another rule exports.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[Dimension, ...], ...]
    aliases: tuple[str, ...] = ()
    when: Callable[[Architecture], bool] = always
    exported: bool = True

    @property
    def of_expert(self) -> bool:
        """True where every expert has such a parameter."""
        return "{expert}" in self.megatron

    @property
    def stage(self) -> Literal["first", "layer", "last"]:
        """The pipeline stage that holds it: the first, the last, or the one that has its layer."""
        if "{layer}" in self.megatron:
            return "layer"
        return "first" if self.megatron.startswith("embedding.") else "last"

    @abstractmethod
    def shard(self, tensors: Sequence[Tensor], arch: Architecture, part: Shard) -> Tensor:
        """One rank's parameter, from whole tensors in the order of `hf`: contiguous, in memory of its own."""

    @abstractmethod
    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        """Whole tensors in the order of `hf`, contiguous, from every rank's parameter in rank order.

        The result may share memory with `shards`.
        """

    @abstractmethod
    def views(self, parameter: Tensor, arch: Architecture, part: Shard) -> Iterator[View]:
        """Yield the parts of whole tensors in one rank's contiguous parameter, as views of its memory.

        The views of all ranks together hold every element of a tensor once, or on every rank where it is replicated.
        """


class Replicated(Rule):
    """The same tensor on every rank: norms."""

    def shard(self, tensors: Sequence[Tensor], arch: Architecture, part: Shard) -> Tensor:
        """A copy of the one tensor."""
        (whole,) = tensors
        return _copy(whole)

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        """The first rank's tensor."""
        return (shards[0].contiguous(),)

    def views(self, parameter: Tensor, arch: Architecture, part: Shard) -> Iterator[View]:
        """All of it."""
        yield View(0, 0, 0, parameter)


class VocabularySplit(Rule):
    """Rows of the vocabulary, padded with zero rows so that every rank holds equally many."""

    def shard(self, tensors: Sequence[Tensor], arch: Architecture, part: Shard) -> Tensor:
        """This rank's rows; those past the real vocabulary are zeros."""
        (whole,) = tensors
        first, length = part.rows_of(padded_vocab(arch.vocab, part.count, part.vocab_multiple))
        rows = whole.new_zeros(length, *whole.shape[1:])
        real = max(0, min(length, arch.vocab - first))
        rows[:real] = whole[first : first + real]
        return rows

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        """All real rows; padding is dropped."""
        return (_joined(shards, dim=0)[: arch.vocab],)

    def views(self, parameter: Tensor, arch: Architecture, part: Shard) -> Iterator[View]:
        """The real rows; a rank whose rows are all padding has none."""
        first, length = part.rows_of(padded_vocab(arch.vocab, part.count, part.vocab_multiple))
        real = max(0, min(length, arch.vocab - first))
        if real:
            yield View(0, 0, first, parameter[:real])


class RowSplit(Rule):
    """Rows split over ranks: a weight for each output of queries or keys, whose heads a rank has a run of."""

    def shard(self, tensors: Sequence[Tensor], arch: Architecture, part: Shard) -> Tensor:
        """This rank's rows."""
        (whole,) = tensors
        return _copy(whole.narrow(0, *part.rows_of(whole.shape[0])))

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        """All rows, in rank order."""
        return (_joined(shards, dim=0),)

    def views(self, parameter: Tensor, arch: Architecture, part: Shard) -> Iterator[View]:
        """This rank's rows."""
        yield View(0, 0, part.rank * parameter.shape[0], parameter)


class ColumnSplit(Rule):
    """Input columns split over ranks: the second linear map of attention and of the MLP."""

    def shard(self, tensors: Sequence[Tensor], arch: Architecture, part: Shard) -> Tensor:
        """This rank's columns."""
        (whole,) = tensors
        return _copy(whole.narrow(1, *part.rows_of(whole.shape[1])))

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        """All columns, in rank order."""
        return (_joined(shards, dim=1),)

    def views(self, parameter: Tensor, arch: Architecture, part: Shard) -> Iterator[View]:
        """This rank's columns."""
        yield View(0, 1, part.rank * parameter.shape[1], parameter)


class FusedQKV(Rule):
    """Query, key and value rows (of a weight or a bias) in one parameter, ordered by query group.

    Megatron's row order is, per key-value head g: its heads/kv_heads query heads, then key g, then value g. A
    rank holds a run of whole groups.
    """

    def shard(self, tensors: Sequence[Tensor], arch: Architecture, part: Shard) -> Tensor:
        """This rank's groups."""
        groups = part.rows_of(arch.kv_heads)
        blocks = [_by_group(tensor, arch).narrow(0, *groups) for tensor in tensors]
        return _concatenated(blocks, dim=1).flatten(0, 1)

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        """Query, key and value, each with its heads in order."""
        query_rows = arch.heads // arch.kv_heads * arch.head_dim
        fused = _by_group(_joined(shards, dim=0), arch)
        blocks = fused.split_with_sizes([query_rows, arch.head_dim, arch.head_dim], dim=1)
        return tuple(block.flatten(0, 1).contiguous() for block in blocks)

    def views(self, parameter: Tensor, arch: Architecture, part: Shard) -> Iterator[View]:
        """Each group's query, key and value rows: only within a group are they contiguous."""
        first, groups = part.rows_of(arch.kv_heads)
        query_rows = arch.heads // arch.kv_heads * arch.head_dim
        rows = (query_rows, arch.head_dim, arch.head_dim)
        for group, fused in enumerate(parameter.chunk(groups, dim=0), start=first):
            for number, values in enumerate(fused.split_with_sizes(rows, dim=0)):
                yield View(number, 0, group * rows[number], values)


class GatedMLP(Rule):
    """Gate and up rows in one parameter: every rank holds its gate rows, then its up rows."""

    def shard(self, tensors: Sequence[Tensor], arch: Architecture, part: Shard) -> Tensor:
        """This rank's gate rows on top of its up rows."""
        gate, up = tensors
        rows = part.rows_of(gate.shape[0])
        return _concatenated([gate.narrow(0, *rows), up.narrow(0, *rows)], dim=0)

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        """All gate rows, and all up rows."""
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return tuple(_joined(parts, dim=0) for parts in zip(*halves, strict=True))

    def views(self, parameter: Tensor, arch: Architecture, part: Shard) -> Iterator[View]:
        """This rank's gate rows, and its up rows."""
        for number, values in enumerate(parameter.chunk(2, dim=0)):
            yield View(number, 0, part.rank * values.shape[0], values)


def _by_group(rows: Tensor, arch: Architecture) -> Tensor:
    return rows.reshape(arch.kv_heads, rows.shape[0] // arch.kv_heads, *rows.shape[1:])


def _copy(tensor: Tensor) -> Tensor:
    # A reader's tensors are views of the mapped file; a shard must outlive it, in its own layout.
    return tensor.clone(memory_format=torch.contiguous_format)


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate without `torch.cat`, which on the meta device imports torch's compiler: a second of every plan."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    whole, start = parts[0].new_empty(shape), 0
    for part in parts:
        whole.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return whole


def _joined(shards: Sequence[Tensor], dim: int) -> Tensor:
    return shards[0].contiguous() if len(shards) == 1 else torch.cat(list(shards), dim=dim)
