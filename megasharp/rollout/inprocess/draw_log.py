"""The tokens that rows have drawn so far, until their samples end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megasharp.rollout.inprocess.generation import Draw

# Steps that there is room for at first; twice as many whenever the oldest sample needs more.
FIRST_STEPS = 64


class DrawLog:
    """Draws by step and row, on the device. What comes before the oldest sample that still runs is overwritten.

    `steps` counts from the first step on. Columns are [steps, S] where a `Draw` of one step holds [S].
    """

    def __init__(self) -> None:
        self.steps = 0
        self._block: Draw | None = None
        # The step of the block's first entry.
        self._first = 0

    @property
    def full(self) -> bool:
        """Return whether `make_room` must come before `add`."""
        return self._block is not None and self.steps - self._first == self._block.tokens_S.shape[0]

    def make_room(self, oldest: int) -> None:
        """Forget the steps before `oldest`; enlarge the block where that frees less than half of it."""
        assert self._block is not None
        room, freed = self._block.tokens_S.shape[0], oldest - self._first
        larger = room if 2 * freed >= room else 2 * room

        def moved(values: Tensor) -> Tensor:
            other = values.new_empty((larger, *values.shape[1:]))
            other[: room - freed] = values[freed:]
            return other

        self._block = self._block.apply(moved)
        self._first = oldest

    def add(self, drawn: Draw) -> None:
        """Note one step's draws. There may be more rows than before, behind the others."""
        rows = drawn.tokens_S.shape[0]
        if self._block is None:
            self._block = drawn.apply(lambda values: values.new_empty((FIRST_STEPS, *values.shape)))
        elif (before := self._block.tokens_S.shape[1]) < rows:

            def widened(values: Tensor) -> Tensor:
                other = values.new_empty((values.shape[0], rows, *values.shape[2:]))
                other[:, :before] = values
                return other

            self._block = self._block.apply(widened)
        step = self.steps - self._first
        for values, new in zip(self._block.columns(), drawn.columns(), strict=True):
            values[step] = new
        self.steps += 1

    def keep(self, order: Tensor) -> None:
        """Row `i` becomes what row `order[i]` was (int64, on the device); the others are dropped."""
        if not order.numel():
            self._block, self._first = None, self.steps
        elif self._block is not None:
            filled = self.steps - self._first

            def kept(values: Tensor) -> Tensor:
                other = values.new_empty((values.shape[0], order.numel(), *values.shape[2:]))
                other[:filled] = values[:filled].index_select(1, order)
                return other

            self._block = self._block.apply(kept)

    def of(self, rows: Sequence[int], starts: Sequence[int]) -> tuple[Draw, list[int]]:
        """Return, on the CPU, all that these rows drew since the steps `starts`: one behind the other, and lengths."""
        assert self._block is not None
        start_E = torch.tensor(starts, dtype=torch.int64)
        lengths_E = self.steps - start_E
        before_T = (start_E - self._first - lengths_E.cumsum(0) + lengths_E).repeat_interleave(lengths_E)
        step_T = before_T + torch.arange(before_T.numel())
        row_T = torch.tensor(rows, dtype=torch.int64).repeat_interleave(lengths_E)
        places_T = (step_T * self._block.tokens_S.shape[1] + row_T).to(self._block.tokens_S.device)
        drawn = self._block.apply(lambda values: values.flatten(0, 1).index_select(0, places_T).cpu())
        return drawn, lengths_E.tolist()
