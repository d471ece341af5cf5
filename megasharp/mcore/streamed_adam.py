"""Adam whose moments, and main weights, lie in host memory and come to the GPU piece by piece in each step.

A step reads and writes 12 bytes a parameter over the bus, both ways at once: while one piece is updated, the next one
is on its way in and the one before on its way out. Adam itself runs on the GPU, by the kernels that it has without
this, so that results are the same to the bit. On the CPU it would move 6 bytes instead, but read and write 28 in the
host's memory, on cores that jobs rarely have; and its bits would be others.

There is one copy of each number, and it is what checkpoints read and write: implementations that keep several are
known for continuing from the wrong one after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasharp.mcore.adam import Adam
from megasharp.mcore.page_locked import PageLocked

KEY = "policy.optimizer_offload"
# Elements of a piece, and how many pieces are on the GPU at once: one comes, one is updated, one goes.
PIECE, SLOTS = 8 * 2**20, 3
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Parameters begin, and are cut, at multiples of it: kernels then read many elements at once.
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `first` to `last` of a parameter (its number), which lie from `offset` on in their piece."""

    parameter: int
    first: int
    last: int
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + size) of the flat memory: parts of parameters of one group."""

    group: int
    start: int
    size: int
    parts: tuple[Part, ...]


def cut(groups: Sequence[Sequence[int]], size: int) -> tuple[list[int], int, list[Piece]]:
    """Where parameters of these numbers of elements begin in flat memory, its size, and its pieces.

    `size` of a piece is a multiple of 64.
    """
    starts: list[int] = []
    pieces: list[Piece] = []
    end = 0
    for number, counts in enumerate(groups):
        begin = end
        parts: dict[int, list[Part]] = {}
        for count in counts:
            at, parameter = end, len(starts)
            starts.append(end)
            while at < end + count:
                index = (at - begin) // size
                last = min(end + count, begin + (index + 1) * size)
                parts.setdefault(index, []).append(Part(parameter, at - end, last - end, at - begin - index * size))
                at = last
            end += -(-count // _ALIGNED) * _ALIGNED
        pieces += [
            Piece(number, begin + index * size, min(size, end - begin - index * size), tuple(found))
            for index, found in parts.items()
        ]
    return starts, end, pieces


class StreamedAdam(Adam):
    """Adam over `groups` of flat float32 parameters, whose gradients are their `decoupled_grad`, on `device`.

    `weights`: the model's weights of lower precision, of those parameters that are only their float32 copies. These
    copies move to host memory, and a step writes the weights too; other parameters stay where they are.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        weights: Mapping[Tensor, Tensor],
        device: torch.device,
        adam_w_mode: bool = True,
        piece: int | None = None,
    ) -> None:
        super().__init__([torch.empty(0)], adam_w_mode=adam_w_mode)
        # Views into other tensors are among them, which torch refuses to be given.
        self.param_groups = groups
        self._device = device
        self._parameters: list[Tensor] = [p for group in groups for p in group["params"]]
        self._starts, total, self._pieces = cut(
            [[p.numel() for p in group["params"]] for group in groups], piece or PIECE
        )
        sizes = (total if weights else 0, *(total for _ in _MOMENTS))
        self._locked = [PageLocked(size, torch.float32, device, KEY, f"set {KEY}=false") for size in sizes]
        self._mains, *self._moments = (locked.memory for locked in self._locked)
        self._weights = [weights.get(p) for p in self._parameters]
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        for p, start, weight in zip(self._parameters, self._starts, self._weights, strict=True):
            if weight is not None:
                p.data = self._mains[start : start + p.numel()].copy_(p)
        self.restore_state()

    def restore_state(self) -> None:
        """Have all moments in their memory: copied there if others took their place, zero where there are none."""
        for p, start in zip(self._parameters, self._starts, strict=True):
            state = self.state[p]
            for name, flat in zip(_MOMENTS, self._moments, strict=True):
                place, found = flat[start : start + p.numel()], state.get(name)
                if found is None:
                    place.zero_()
                elif found.data_ptr() != place.data_ptr():
                    place.copy_(found)
                state[name] = place

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's own, which would move the moments to where the gradients are."""
        for group, found in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.pop("step", None)
            group.update({name: value for name, value in found.items() if name != "params"})
        for number, found in state_dict["state"].items():
            self.state[self._parameters[number]] = {name: found[name] for name in _MOMENTS}
        self.restore_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter, and the model's weights; all of it is done when this returns."""
        loss = closure() if closure is not None else None
        self.restore_state()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        self._streams = self._streams or (torch.cuda.Stream(), torch.cuda.Stream())  # type: ignore[no-untyped-call]
        incoming, outgoing = self._streams
        current = torch.cuda.current_stream()
        most = max((piece.size for piece in self._pieces), default=0)
        slots = [torch.empty(3, most, dtype=torch.float32, device=self._device) for _ in self._pieces[:SLOTS]]
        # After the slots: under deterministic algorithms torch fills them first, on the current stream.
        incoming.wait_stream(current)
        free: list[torch.cuda.Event | None] = [None] * len(slots)
        for number, piece in enumerate(self._pieces):
            slot = number % SLOTS
            rows = slots[slot][:, : piece.size]
            left = free[slot]
            if left is not None:
                incoming.wait_event(left)
            with torch.cuda.stream(incoming):
                self._fetch(rows, piece)
            current.wait_event(incoming.record_event())
            self._update_piece(rows, piece)
            outgoing.wait_event(current.record_event())
            with torch.cuda.stream(outgoing):
                self._give_back(rows, piece)
            free[slot] = outgoing.record_event()
        # A checkpoint may read the host's memory next.
        outgoing.synchronize()
        return loss

    def _held(self, piece: Piece) -> list[Tensor]:
        """The host's memory of a piece; no main weights where the parameters are the model's own."""
        return [flat[piece.start : piece.start + piece.size] for flat in (self._mains, *self._moments)]

    def _fetch(self, rows: Tensor, piece: Piece) -> None:
        for row, held in zip(rows, self._held(piece), strict=True):
            if held.numel():
                row.copy_(held, non_blocking=True)

    def _give_back(self, rows: Tensor, piece: Piece) -> None:
        for row, held in zip(rows, self._held(piece), strict=True):
            if held.numel():
                held.copy_(row, non_blocking=True)

    def _update_piece(self, rows: Tensor, piece: Piece) -> None:
        places = [slice(part.offset, part.offset + part.last - part.first) for part in piece.parts]
        own = [self._parameters[part.parameter] for part in piece.parts]
        weights = [self._weights[part.parameter] for part in piece.parts]
        mains = [
            p.detach()[part.first : part.last] if weight is None else rows[0, place]
            for p, weight, part, place in zip(own, weights, piece.parts, places, strict=True)
        ]
        gradients = [
            p.decoupled_grad[part.first : part.last]  # type: ignore[attr-defined]
            for p, part in zip(own, piece.parts, strict=True)
        ]
        moments, squares = ([rows[row, place] for place in places] for row in (1, 2))
        self._apply(self.param_groups[piece.group], mains, gradients, moments, squares)
        for weight, main, part in zip(weights, mains, piece.parts, strict=True):
            if weight is not None:
                weight[part.first : part.last].copy_(main)
