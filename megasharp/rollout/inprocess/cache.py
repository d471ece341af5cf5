"""Keys and values of past tokens: each prompt's once for all rows that read it, each row's own tokens in blocks.

Rows begin and end at different steps, so their lengths differ. A row's own tokens fill blocks of `BLOCK` slots, in any
places of one pool: a step reads the tokens that are there, however unequal the rows are, and a row that ends gives its
blocks back by a copy of as many. While no row has more than one block, block `s` is row `s`'s and grows with its
tokens; a step then needs no index of blocks.

Bookkeeping is on the CPU, where no step has to wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Slots of a block. Batched products over blocks of 16 take 1.4 times those over whole rows, of 32 and 64 about 1.1.
BLOCK = 32
# Slots added to all blocks at once, while rows have one each. Kept tight because a step reads every row: free slots
# between them cost more (15 % of generation with 32 slots for 18 tokens) than growing does.
GROWTH = 6


def moved_up(count: int, freed: Collection[int]) -> list[int]:
    """Return the place among `count` from which each that stays takes its contents, `freed` ones filled by the last."""
    left = count - len(freed)
    gone = set(freed)
    last = (place for place in range(left, count) if place not in gone)
    return [next(last) if place in gone else place for place in range(left)]


def move(tensors: Sequence[Tensor], sources: Tensor, destinations: Tensor) -> None:
    """Copy entries of the first dimension to other ones."""
    if sources.numel():
        for tensor in tensors:
            tensor.index_copy_(0, destinations, tensor.index_select(0, sources))


class PromptCache:
    """Per layer `keys` and `values` [places, kv_heads, capacity, head_dim]; the first `lengths_B.numel()` are in use.

    Prompts are padded on the right. `mask`, float [B * kv_heads, 1, longest], hides the padding; None where there is
    none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.lengths_B = torch.empty(0, dtype=torch.int64)
        self.longest = 0
        self.mask: Tensor | None = None

    def add(self, keys: list[Tensor], values: list[Tensor], lengths: Sequence[int]) -> None:
        """Put prompts behind those that are there: a layer's tensors are [prompts, kv_heads, padded, head_dim]."""
        first = self.lengths_B.numel()
        self.lengths_B = torch.cat([self.lengths_B, torch.tensor(lengths, dtype=torch.int64)])
        if self.keys:
            self.keys = [self._joined(old, new, first) for old, new in zip(self.keys, keys, strict=True)]
            self.values = [self._joined(old, new, first) for old, new in zip(self.values, values, strict=True)]
        else:
            self.keys, self.values = keys, values
        self._measure()

    def keep(self, order: Sequence[int]) -> None:
        """Place `i` takes the prompt of place `order[i]`; the others are freed."""
        sources = torch.tensor(order, dtype=torch.int64)
        places = (sources != torch.arange(len(order))).nonzero().squeeze(1)
        move([*self.keys, *self.values], sources[places].to(self._device), places.to(self._device))
        self.lengths_B = self.lengths_B[sources]
        self._measure()

    def _joined(self, old: Tensor, new: Tensor, first: int) -> Tensor:
        (places, heads, capacity, dim), (count, _, padded, _) = old.shape, new.shape
        if first + count > places or padded > capacity:
            # Zeros, because a hidden slot counts nothing only while it is finite.
            more = max(first + count, places + places // 2 if first + count > places else places)
            grown = old.new_zeros((more, heads, max(capacity, padded), dim))
            grown[:first, :, :capacity] = old[:first]
            old = grown
        old[first : first + count, :, :padded] = new
        return old

    def _measure(self) -> None:
        self.longest = int(self.lengths_B.max())
        hidden = torch.arange(self.longest) >= self.lengths_B[:, None]
        self.mask = None
        if bool(hidden.any()):
            self.mask = additive(hidden.to(self._device), self.keys[0].dtype, self.keys[0].shape[1])


def additive(hidden: Tensor, dtype: torch.dtype, heads: int) -> Tensor:
    """The mask [n * heads, 1, k] that is added to scores, of bool [n, k]."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf")).repeat_interleave(heads, dim=0).unsqueeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The positions that a step's queries see: of the prompt all but `hidden_SP`, of own blocks slots from `first` on.

    `mask`, [blocks * kv_heads, 1, slots], is added to the scores of these slots. None hides nothing.
    """

    hidden_SP: Tensor | None
    first: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of rows with several: `row_N` of each, and its place among the `width` first or later ones of a row.

    `place_N` is that in a layout [S, width + 1] by row, whose last column belongs to the row's prompt.
    """

    row_N: Tensor
    place_N: Tensor
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step's tokens: `positions_S`, all below `highest`, and where their keys and values go.

    Each goes to slot `slot_S` of block `block_S`; where `slot` is given, to that slot of block `s`. Slots before
    `filled` are read. `blocks` is None while block `s` is all that row `s` has. `views` are by layers' windows.
    """

    positions_S: Tensor
    highest: int
    slot: int | None
    slot_S: Tensor
    block_S: Tensor
    filled: int
    blocks: Blocks | None
    views: dict[int | None, View]


class KeyValueCache:
    """The keys and values of S rows: `prompts`, and per layer `keys`, `values` [blocks, kv_heads, slots, head_dim].

    Row `s` reads prompt `prompt_S[s]`, and sits at place `place_S[s]` of the grid [B, width] that lays out the
    rows by prompt (None when row `s` is simply place `s`).

    With a `response_window` W a row has the last W of its own tokens, and the newest takes the oldest one's slot. Their
    order in memory then is not that of their positions, which are in the keys.
    """

    def __init__(self, layers: int, heads: int, dim: int, like: Tensor, response_window: int | None = None) -> None:
        self._device = like.device
        self._heads = heads
        self.response_window = response_window
        self.prompts = PromptCache(like.device)
        self.keys = [like.new_zeros((0, heads, 0, dim)) for _ in range(layers)]
        self.values = [like.new_zeros((0, heads, 0, dim)) for _ in range(layers)]
        self._clear()

    def _clear(self) -> None:
        """Drop all rows and blocks; those that follow have slots as tight as at first."""
        self.prompt_S = torch.empty(0, dtype=torch.int64)
        self.lengths_S = torch.empty(0, dtype=torch.int64)
        # The block of each row's first, second, ... slots, -1 where it has none; and the inverse.
        self._block_SM = torch.empty((0, 1), dtype=torch.int64)
        self._row_N = torch.empty(0, dtype=torch.int64)
        self._ordinal_N = torch.empty(0, dtype=torch.int64)
        self._count = 0
        self._plain = True
        self._laid_out = False
        self._resize(0, 0)

    def extend(self, prompts: Sequence[int]) -> None:
        """Begin more rows behind those that there are, one for each of `prompts`, which are places."""
        first, added = self.lengths_S.numel(), torch.tensor(prompts, dtype=torch.int64)
        self.prompt_S = torch.cat([self.prompt_S, added])
        self.lengths_S = torch.cat([self.lengths_S, torch.zeros_like(added)])
        columns = torch.full((added.numel(), self._block_SM.shape[1]), -1)
        self._block_SM = torch.cat([self._block_SM, columns])
        self._laid_out = False
        self._add_blocks(torch.arange(first, self.lengths_S.numel()), torch.zeros_like(added))

    def restart(self, rows: Sequence[int], prompts: Sequence[int]) -> None:
        """Begin these rows again, for the prompts at these places."""
        chosen = torch.tensor(rows, dtype=torch.int64)
        self.prompt_S[chosen] = torch.tensor(prompts, dtype=torch.int64)
        self.lengths_S[chosen] = 0
        self._laid_out = False
        if not self._plain:
            freed = self._block_SM[chosen, 1:]
            self._block_SM[chosen, 1:] = -1
            self._close_up(freed[freed >= 0])

    def keep(self, order: Sequence[int]) -> None:
        """Row `i` becomes what row `order[i]` was; the others are dropped."""
        if not order:
            self._clear()
            return
        kept = torch.tensor(order, dtype=torch.int64)
        rows = self.lengths_S.numel()
        self.prompt_S, self.lengths_S = self.prompt_S[kept], self.lengths_S[kept]
        self._laid_out = False
        now = torch.arange(len(order))
        if self._plain:
            moved = (kept != now).nonzero().squeeze(1)
            move([*self.keys, *self.values], kept[moved].to(self._device), moved.to(self._device))
            self._count = len(order)
            self._block_SM = now[:, None]
            return
        became = torch.full((rows,), -1)
        became[kept] = now
        self._block_SM = self._block_SM[kept]
        self._row_N[: self._count] = became[self._row_N[: self._count]]
        self._close_up((self._row_N[: self._count] < 0).nonzero().squeeze(1))

    def keep_prompts(self, order: Sequence[int]) -> None:
        """Prompt `i` becomes what `order[i]` was; rows of others, which are not sampled any more, read some prompt."""
        became = torch.zeros(self.prompts.lengths_B.numel(), dtype=torch.int64)
        became[torch.tensor(order)] = torch.arange(len(order))
        self.prompts.keep(order)
        self.prompt_S = became[self.prompt_S]
        self._laid_out = False

    def next_step(self, windows: Collection[int | None]) -> Step:
        """Make room for each row's next token; `windows` are those of the layers (None: all positions are seen)."""
        window = self.response_window
        slots_S = self.lengths_S if window is None else self.lengths_S % window
        self._make_room(slots_S)
        if not self._laid_out:
            self._lay_out()
        longest, even = int(self.lengths_S.max()), False
        if self._plain:
            even = int(self.lengths_S.min()) == longest
        capacity = self.keys[0].shape[2]
        filled = min(longest + 1, capacity) if self._plain else capacity
        positions_S = self.prompts.lengths_B[self.prompt_S] + self.lengths_S
        return Step(
            positions_S=positions_S.to(self._device),
            highest=self.prompts.longest + longest + 1,
            slot=int(slots_S[0]) if even else None,
            slot_S=(slots_S % BLOCK).to(self._device),
            block_S=self._block_SM.gather(1, slots_S[:, None] // BLOCK).squeeze(1).to(self._device),
            filled=filled,
            blocks=None if self._plain else self._blocks(),
            views={each: self._view(each, positions_S, filled, even) for each in windows},
        )

    def write(self, layer: int, step: Step, key: Tensor, value: Tensor) -> None:
        """Put the keys and values [S, kv_heads, head_dim] of a step's tokens where they belong."""
        for pool, new in ((self.keys[layer], key), (self.values[layer], value)):
            if step.slot is not None:
                pool[: self._count, :, step.slot] = new
            else:
                pool[step.block_S, :, step.slot_S] = new

    def own(self, layer: int, first: int, filled: int) -> tuple[Tensor, Tensor]:
        """Keys and values [blocks * kv_heads, slots, head_dim] of all blocks, of slots `[first, filled)`."""
        keys, values = (pool[: self._count, :, first:filled] for pool in (self.keys[layer], self.values[layer]))
        return keys.flatten(0, 1), values.flatten(0, 1)

    def shared(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B * kv_heads, longest, head_dim] of all prompts."""
        count, longest = self.prompts.lengths_B.numel(), self.prompts.longest
        keys, values = self.prompts.keys[layer], self.prompts.values[layer]
        return keys[:count, :, :longest].flatten(0, 1), values[:count, :, :longest].flatten(0, 1)

    def to_grid(self, rows_S: Tensor) -> Tensor:
        """[S, ...] laid out as [B, width, ...]; places without a row are zero."""
        shape = (self.prompts.lengths_B.numel(), self.width, *rows_S.shape[1:])
        if self.place_S is None:
            return rows_S.view(shape)
        grid = rows_S.new_zeros(shape)
        grid.flatten(0, 1)[self.place_S] = rows_S
        return grid

    def from_grid(self, grid: Tensor) -> Tensor:
        """The inverse of `to_grid`."""
        rows = grid.flatten(0, 1)
        return rows if self.place_S is None else rows.index_select(0, self.place_S)

    def _blocks(self) -> Blocks:
        row_N, ordinal_N = self._row_N[: self._count], self._ordinal_N[: self._count]
        width = self._block_SM.shape[1]
        place_N = row_N * (width + 1) + ordinal_N
        return Blocks(row_N.to(self._device), place_N.to(self._device), width)

    def _view(self, window: int | None, positions_S: Tensor, filled: int, even: bool) -> View:
        """For the next token, in a layer where a query sees `window` positions, its own included."""
        longest = int(self.lengths_S.max())
        if window is None or window > int(positions_S.max()):
            return View(None, 0, None if even else self._mask(None, filled))
        hidden_SP = torch.arange(self.prompts.longest) <= (positions_S - window)[:, None]
        first = max(0, longest + 1 - window) if even else 0
        return View(hidden_SP.to(self._device), first, None if even else self._mask(window, filled))

    def _mask(self, window: int | None, filled: int) -> Tensor:
        """Hides slots without a token, and tokens before the window."""
        newest_N = self.lengths_S
        if self.response_window is not None:
            newest_N = newest_N.clamp(max=self.response_window - 1)
        if not self._plain:
            newest_N = newest_N[self._row_N[: self._count]] - BLOCK * self._ordinal_N[: self._count]
        slot = torch.arange(filled)
        hidden = slot > newest_N[:, None]
        if window is not None:
            hidden |= slot <= (newest_N - window)[:, None]
        return additive(hidden.to(self._device), self.keys[0].dtype, self._heads)

    def _make_room(self, slots_S: Tensor) -> None:
        newest, slots = int(slots_S.max()), self.keys[0].shape[2]
        if self._plain and newest < BLOCK:
            if newest >= slots:
                larger = max(newest + 1, slots + max(GROWTH, slots // 4))
                self._resize(self._count, min(larger, BLOCK, self.response_window or BLOCK))
            return
        self._plain = False
        ordinals_S = slots_S // BLOCK
        missing = newest // BLOCK + 1 - self._block_SM.shape[1]
        if missing > 0:
            columns = torch.full((self._block_SM.shape[0], missing), -1)
            self._block_SM = torch.cat([self._block_SM, columns], dim=1)
        rows = (self._block_SM.gather(1, ordinals_S[:, None]).squeeze(1) < 0).nonzero().squeeze(1)
        if rows.numel():
            self._add_blocks(rows, ordinals_S[rows])

    def _add_blocks(self, rows: Tensor, ordinals: Tensor) -> None:
        count = self._count + rows.numel()
        if count > self.keys[0].shape[0]:
            self._resize(count if self._plain else count + count // 4, self.keys[0].shape[2])
        if count > self._row_N.numel():
            spare = torch.zeros(count, dtype=torch.int64)
            self._row_N, self._ordinal_N = torch.cat([self._row_N, spare]), torch.cat([self._ordinal_N, spare])
        self._row_N[self._count : count] = rows
        self._ordinal_N[self._count : count] = ordinals
        self._block_SM[rows, ordinals] = torch.arange(self._count, count)
        self._count = count

    def _close_up(self, freed: Tensor) -> None:
        """Move the last blocks of the pool to the places of `freed` ones."""
        if not freed.numel():
            return
        used = torch.ones(self._count, dtype=torch.bool)
        used[freed] = False
        left = self._count - freed.numel()
        holes, last = freed[freed < left], used[left:].nonzero().squeeze(1) + left
        move([*self.keys, *self.values], last.to(self._device), holes.to(self._device))
        move([self._row_N, self._ordinal_N], last, holes)
        self._block_SM[self._row_N[holes], self._ordinal_N[holes]] = holes
        self._count = left

    def _resize(self, blocks: int, slots: int) -> None:
        """New pools with what the old ones hold, and zeros: a hidden slot counts nothing only while it is finite."""
        self.keys = [_grown(pool, blocks, slots) for pool in self.keys]
        self.values = [_grown(pool, blocks, slots) for pool in self.values]

    def _lay_out(self) -> None:
        """Rows of one prompt side by side, in row order."""
        counts_B = self.prompt_S.bincount(minlength=self.prompts.lengths_B.numel())
        self.width = int(counts_B.max())
        order = self.prompt_S.argsort(stable=True)
        places = torch.arange(order.numel())
        rank = places - (counts_B.cumsum(0) - counts_B).repeat_interleave(counts_B)
        place_S = self.prompt_S * self.width
        place_S[order] += rank
        plain = order.numel() == counts_B.numel() * self.width and bool((place_S == places).all())
        self.place_S: Tensor | None = None if plain else place_S.to(self._device)
        self._laid_out = True


def _grown(pool: Tensor, blocks: int, slots: int) -> Tensor:
    count, heads, filled, dim = pool.shape
    grown = pool.new_zeros((blocks, heads, slots, dim))
    if kept := min(count, blocks):
        grown[:kept, :, :filled] = pool[:kept]
    return grown
