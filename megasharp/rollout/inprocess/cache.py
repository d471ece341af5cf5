"""Keys and values of past tokens: one copy per prompt, and one row per sample for what it drew since.

The samples of a group share their prompt's part, so a step reads each prompt once however many samples it
has. With 48 prompts of 150 tokens and 8 samples each this took three quarters of the time of a cache that
copies the prompt into every row; with prompts of 14 tokens the two were equal (one core).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Slots added when a row is full, or a quarter of the capacity where that is more. Kept tight because a step reads
# every row: free slots between them cost more (15 % of generation with 32 slots for 18 tokens) than growing does.
GROWTH = 6


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What a step's queries see: prompt positions by `mask`, float [B * kv_heads, 1, prompt] (None: all), and own
    slots from `first` on."""

    mask: Tensor | None
    first: int


class KeyValueCache:
    """Per layer, `prompt_keys` [B, kv_heads, prompt, head_dim] and `keys` [S, kv_heads, capacity, head_dim].

    Prompts are padded on the right to one length; `mask`, float [B * kv_heads, 1, prompt], hides the
    padding (None when there is none). Slots `0 .. length - 1` of `keys` and `values` are filled, alike in all rows.
    Row `s` reads prompt `prompt_S[s]`, and sits at place `place_S[s]` of the grid [B, width] that lays out the
    rows by prompt (None when row `s` is simply place `s`).
    """

    def __init__(self, prompt_keys: list[Tensor], prompt_values: list[Tensor], lengths_B: Tensor) -> None:
        self.prompt_keys = prompt_keys
        self.prompt_values = prompt_values
        self.lengths_B = lengths_B
        self.mask = self._padding_mask()
        self.length = 0
        self.prompt_S = torch.arange(lengths_B.numel(), device=lengths_B.device)
        self.keys = self._empty(0)
        self.values = self._empty(0)
        self._lay_out()

    @property
    def positions(self) -> Tensor:
        """int64 [S]: the position of each row's next token."""
        return self.lengths_B.index_select(0, self.prompt_S) + self.length

    def view(self, window: int | None) -> View:
        """For the next token, in a layer where a query sees `window` positions, its own included (None: all)."""
        if window is None or window > self.prompt_keys[0].shape[2] + self.length:
            return View(self.mask, 0)
        oldest_B = self.lengths_B + self.length + 1 - window
        return View(self._prompt_mask(oldest_B), max(0, self.length + 1 - window))

    def select(self, rows: Tensor) -> None:
        """Keep `rows` (int64 indices, repeats allowed) in that order; prompts without a row are freed."""
        self.keys = [tensor.index_select(0, rows) for tensor in self.keys]
        self.values = [tensor.index_select(0, rows) for tensor in self.values]
        self.prompt_S = self.prompt_S.index_select(0, rows)
        used_B = self.prompt_S.bincount(minlength=self.lengths_B.numel()) > 0
        if not bool(used_B.all()):
            prompts = used_B.nonzero().squeeze(1)
            self.prompt_S = (used_B.cumsum(0) - 1).index_select(0, self.prompt_S)
            self.prompt_keys = [tensor.index_select(0, prompts) for tensor in self.prompt_keys]
            self.prompt_values = [tensor.index_select(0, prompts) for tensor in self.prompt_values]
            self.lengths_B = self.lengths_B.index_select(0, prompts)
            self.mask = self._padding_mask()
        self._lay_out()

    def make_room(self) -> None:
        """Make sure that one more slot per row is free."""
        capacity = self.keys[0].shape[2]
        if self.length < capacity:
            return
        larger = capacity + max(GROWTH, capacity // 4)
        self.keys = self._grown(self.keys, larger)
        self.values = self._grown(self.values, larger)

    def to_grid(self, rows_S: Tensor) -> Tensor:
        """[S, ...] laid out as [B, width, ...]; places without a row are zero."""
        shape = (self.lengths_B.numel(), self.width, *rows_S.shape[1:])
        if self.place_S is None:
            return rows_S.view(shape)
        grid = rows_S.new_zeros(shape)
        grid.flatten(0, 1)[self.place_S] = rows_S
        return grid

    def from_grid(self, grid: Tensor) -> Tensor:
        """The inverse of `to_grid`."""
        rows = grid.flatten(0, 1)
        return rows if self.place_S is None else rows.index_select(0, self.place_S)

    def _grown(self, tensors: list[Tensor], capacity: int) -> list[Tensor]:
        grown = self._empty(capacity)
        for old, new in zip(tensors, grown, strict=True):
            new[:, :, : self.length] = old[:, :, : self.length]
        return grown

    def _empty(self, capacity: int) -> list[Tensor]:
        _, heads, _, dim = self.prompt_keys[0].shape
        shape = (self.prompt_S.numel(), heads, capacity, dim)
        return [tensor.new_empty(shape) for tensor in self.prompt_keys]

    def _lay_out(self) -> None:
        """Rows of one prompt side by side, in row order."""
        counts_B = self.prompt_S.bincount(minlength=self.lengths_B.numel())
        self.width = int(counts_B.max())
        order = self.prompt_S.argsort(stable=True)
        places = torch.arange(order.numel(), device=order.device)
        rank = places - (counts_B.cumsum(0) - counts_B).repeat_interleave(counts_B)
        place_S = self.prompt_S * self.width
        place_S[order] += rank
        plain = order.numel() == counts_B.numel() * self.width and bool((place_S == places).all())
        self.place_S: Tensor | None = None if plain else place_S

    def _padding_mask(self) -> Tensor | None:
        return self._prompt_mask(torch.zeros_like(self.lengths_B))

    def _prompt_mask(self, oldest_B: Tensor) -> Tensor | None:
        """Hides padding, and positions before each prompt's oldest; None where nothing is hidden."""
        _, heads, padded, _ = self.prompt_keys[0].shape
        position_P = torch.arange(padded, device=self.lengths_B.device)
        hidden = (position_P >= self.lengths_B[:, None]) | (position_P < oldest_B[:, None])
        if not bool(hidden.any()):
            return None
        mask = torch.zeros(hidden.shape, dtype=self.prompt_keys[0].dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf")).repeat_interleave(heads, dim=0).unsqueeze(1)
