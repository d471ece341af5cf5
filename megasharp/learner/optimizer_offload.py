"""Megatron's distributed optimizer with its state in host memory (`policy.optimizer_offload`).

`StreamedAdam` keeps moments and main weights in host memory and brings them to the GPU piece by piece in each step. A
step reads and writes 12 bytes a parameter over the bus, both ways at once: while one piece is updated, the next one is
on its way in and the one before on its way out. Adam itself runs on the GPU, by the same kernels as without offload, so
results are equal bit by bit. Adam on the CPU (Megatron's `optimizer_cpu_offload`) would move 6 bytes instead, but read
and write 28 in the host's memory, on cores that jobs rarely have; and its results would differ in their bits.

There is one copy of each number, and checkpoints read and write that one. Implementations that keep several are known
for continuing from the wrong one after a resume.

`HeldOnHost` is Megatron's optimizer around it. Saving, loading and reducing stay Megatron's; methods that expect
gradients beside main weights are replaced.

`PageLocked` is host memory that a GPU copies to and from by itself. torch's own allocator of such memory rounds each
size up to a power of two, which can take almost twice as much, so ordinary memory is registered with the driver.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.learner.cpu_backend import Adam


class PageLocked:
    """`memory`: `size` zeros of `dtype` on the host. Its pages are locked as long as this lives, if `device` is a GPU.

    Raises:
        UserError: the host has not so much memory, or the driver will not lock it. The message names the key `asker`
            and the remedy `instead`.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, asker: str, instead: str) -> None:
        try:
            self.memory = torch.zeros(size, dtype=dtype)
        except RuntimeError as failure:
            raise UserError(
                f"{asker}: the host has no {size * dtype.itemsize / 1e9:.1f} GB of memory left for it; ask for more "
                f"(sbatch --mem), or {instead}"
            ) from failure
        if device.type == "cuda" and size:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(runtime.cudaHostRegister(self.memory.data_ptr(), self.memory.nbytes, 0))
            if error:
                raise UserError(
                    f"{asker}: {self.memory.nbytes / 1e9:.1f} GB of host memory could not be page-locked (CUDA error "
                    f"{error}); ask for more memory (sbatch --mem), or {instead}"
                )
            weakref.finalize(self, _unlock, runtime, self.memory)


def _unlock(runtime: object, memory: Tensor) -> None:
    # The registry of finalizers holds the memory until then.
    runtime.cudaHostUnregister(memory.data_ptr())  # type: ignore[attr-defined]


KEY = "policy.optimizer_offload"
# Elements of a piece, and the number of pieces on the GPU at once: one comes, one is updated, one goes.
PIECE, SLOTS = 8 * 2**20, 3
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Parameters begin, and are cut, at multiples of it: kernels then read many elements at once.
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `first` to `last` (excluded) of a parameter (its number), from `offset` on in their piece."""

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
    """Lay parameters out in flat memory: return the start of each, the memory's size, and its pieces.

    `groups` has each parameter's number of elements, by group; a piece has parts of one group alone. `size`, elements
    of a piece, is a multiple of 64.
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
        # Not through the constructor: views into other tensors are among them, which torch refuses there.
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
        """Put all moments into their host memory: copied if others took their place, zero where there are none."""
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
        """Load moments and settings of groups; torch's own would move the moments to the gradients' device."""
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
            span = slice(piece.start, piece.start + piece.size)
            # A row of the slot and its host memory; there are no main weights where parameters are the model's own.
            flats = zip(rows, (self._mains, *self._moments), strict=True)
            held = [(row, flat[span]) for row, flat in flats if len(flat)]
            left = free[slot]
            if left is not None:
                incoming.wait_event(left)
            with torch.cuda.stream(incoming):
                for row, memory in held:
                    row.copy_(memory, non_blocking=True)
            current.wait_event(incoming.record_event())
            self._update_piece(rows, piece)
            outgoing.wait_event(current.record_event())
            with torch.cuda.stream(outgoing):
                for row, memory in held:
                    memory.copy_(row, non_blocking=True)
            free[slot] = outgoing.record_event()
        # A checkpoint may read the host's memory next.
        outgoing.synchronize()
        return loss

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


class HeldOnHost(DistributedOptimizer):  # type: ignore[misc]
    """A distributed optimizer whose Adam is streamed; a main weight's gradient is its `decoupled_grad`, on the GPU."""

    def _copy_model_grads_to_main_grads(self) -> None:
        models = chain(*self.model_float16_groups, *self.model_fp32_groups)
        mains = chain(*self.shard_fp32_from_float16_groups, *self.shard_fp32_groups)
        for parameter, main in zip(models, mains, strict=True):
            span = self._get_model_param_range_map(parameter)["param"]
            main.decoupled_grad = parameter.main_grad.view(-1)[span.start : span.end]

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """Return the gradients of parameters that no other rank counts, as Megatron's own, in the same order."""
        group = getattr(self, "tp_group", None)
        return [
            p.decoupled_grad
            for p in self.get_parameters()
            if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p, group)
        ]

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[Tensor]:
        """Do the same by its name in Megatron 0.19; only multi-token prediction, which is refused, has norm groups."""
        return self.get_main_grads_for_grad_norm() if grad_norm_group is None else []

    def _copy_main_params_to_model_params(self) -> None:
        """Do nothing: the step has written the weights while their copies were on the GPU."""


def hold_on_host(part: DistributedOptimizer, device: torch.device) -> None:
    """Move the state of an optimizer that has not stepped yet to host memory. Raises UserError as `PageLocked` does."""
    if part.is_stub_optimizer:
        return
    mains, weights = chain(*part.shard_fp32_from_float16_groups), chain(*part.shard_float16_groups)
    part.optimizer = StreamedAdam(
        part.optimizer.param_groups, dict(zip(mains, weights, strict=True)), device, part.config.decoupled_weight_decay
    )
    part.init_state_fn = lambda adam, config=None: adam.restore_state()
    # Megatron's own function builds the optimizer, and knows one class of it.
    part.__class__ = HeldOnHost


def gradients_of(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """Return the flat gradients of this rank's chunks; those of experts are in buffers of their own."""
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


@contextmanager
def without_gradients(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Free the memory of gradients while the block runs; they are zero after it.

    Megatron makes main weights on the GPU, as large as gradients: so building takes no more memory than training.
    """
    gradients = gradients_of(chunks)
    storages = [gradient.untyped_storage() for gradient in gradients]
    sizes = [storage.size() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    yield
    for storage, size in zip(storages, sizes, strict=True):
        storage.resize_(size)
    for gradient in gradients:
        gradient.zero_()
