"""Weights outside the GPU: memory freed for a co-located engine and refilled bit for bit, and the reference's weights.

Megatron keeps weights, gradients and moments in few large storages, with parameters as views into them. Emptying a
storage in place frees its memory, and every view is valid again once it is refilled (`Offloader`).

The reference policy has one copy of its weights, in host memory, which is exchanged with the policy's while something
reads it (`Reference`). A copy on the GPU would take memory that activations or a co-located engine need; the exchange,
once a step, costs the time to move the weights over the bus and back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megasharp.config.policy import OffloadedPart
from megasharp.learner.cpu_backend import return_freed_memory
from megasharp.learner.optimizer import parts
from megasharp.learner.optimizer_offload import PageLocked, StreamedAdam, gradients_of


class Reference:
    """A copy of the parameters' present values, in their dtypes; page-locked where they are on a GPU.

    Raises UserError where the host's memory could not be locked.
    """

    @torch.no_grad()
    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._locked: list[PageLocked] = []
        self._held = [torch.empty(0)] * len(parameters)
        instead = "leave out the methods that read a reference"
        # Parameters of one dtype and device share one piece of memory, one after another.
        for dtype, device in dict.fromkeys((p.dtype, p.device) for p in parameters):
            alike = [i for i, p in enumerate(parameters) if (p.dtype, p.device) == (dtype, device)]
            sizes = [parameters[i].numel() for i in alike]
            locked = PageLocked(sum(sizes), dtype, device, "the reference policy", instead)
            self._locked.append(locked)
            for i, flat in zip(alike, locked.memory.split_with_sizes(sizes), strict=True):
                self._held[i] = flat.view(parameters[i].shape).copy_(parameters[i])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange held values and parameters while the block runs; what it makes of the held ones is kept."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, held in zip(self._parameters, self._held, strict=True):
            value = parameter.clone()
            parameter.copy_(held, non_blocking=True)
            held.copy_(value)


# NaN, in every type of float.
_GONE = 0xFF


@dataclass(slots=True)
class _Held:
    """A storage that was emptied: its size in bytes and its content on the host, None for one that may be lost."""

    storage: torch.UntypedStorage
    size: int
    content: Tensor | None


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return the storage itself as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_shared(storage: torch.UntypedStorage) -> bool:
    """True for shared memory, which torch can empty but not fill again."""
    return storage.device.type == "cpu" and storage.is_shared()


class Offloader:
    """Empties and refills the storages of one rank's learner; the two must alternate.

    Contents of a GPU go to page-locked memory, which the bus reaches several times as fast. It is kept for the next
    time, because locking pages takes longer than filling them. `moves` counts how often weights were emptied. CPU
    memory that engines share (`rollout/sglang/shared_weights.py`) has a fixed size: it is overwritten, which
    frees nothing.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self.moves = 0
        self._held: list[_Held] = []
        self._locked: dict[int, PageLocked] = {}

    def offload(self, kinds: Collection[OffloadedPart]) -> int:
        """Empty the storages of `kinds`; returns the bytes freed. Gradients are not kept: a step starts from zero."""
        assert not self._held, "already offloaded"
        self.moves += "weights" in kinds
        seen: set[int] = set()
        for kind in kinds:
            for tensor in self._tensors(kind):
                storage = tensor.untyped_storage()
                if storage.size() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    content = None if kind == "gradients" else self._copied(tensor, len(self._held))
                    self._held.append(_Held(storage, storage.size(), content))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for held in self._held:
            if _is_shared(held.storage):
                _bytes(held.storage).fill_(_GONE)
            else:
                held.storage.resize_(0)
        if torch.cuda.is_available():
            # Give the memory back to the device, for others on it: torch would keep it for this process.
            torch.cuda.empty_cache()
        return_freed_memory()
        return sum(held.size for held in self._held)

    def onload(self) -> None:
        """Refill everything that `offload` emptied; gradients come back as zeros."""
        for held in self._held:
            if not _is_shared(held.storage):
                held.storage.resize_(held.size)
            if held.content is None:
                _bytes(held.storage).zero_()
            else:
                _bytes(held.storage).copy_(held.content, non_blocking=True)
        self._held = []

    def _copied(self, tensor: Tensor, number: int) -> Tensor:
        """Copy the bytes of a tensor's storage to the host; from a GPU the copy may still be under way."""
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu":
            return _bytes(storage).clone()
        locked = self._locked.pop(number, None)
        if locked is None or locked.memory.numel() != storage.size():
            # Memory of another size is freed first: the host may not hold both.
            locked = None
            locked = PageLocked(storage.size(), torch.uint8, tensor.device, "policy.offload", "list less there")
        self._locked[number] = locked
        return locked.memory.copy_(_bytes(storage), non_blocking=True)

    def _tensors(self, kind: OffloadedPart) -> list[Tensor]:
        if kind == "weights":
            return [parameter.data for chunk in self._chunks for parameter in chunk.module.parameters()]
        if kind == "gradients":
            return gradients_of(self._chunks)
        found = [part.optimizer for part in parts(self._optimizer) if part.optimizer is not None]
        inner = [one for one in found if not isinstance(one, StreamedAdam)]
        moments = [t for o in inner for s in o.state.values() for t in s.values() if torch.is_tensor(t)]
        mains = [p.data for o in inner for group in o.param_groups for p in group["params"]]
        weights = {t.untyped_storage().data_ptr() for t in self._tensors("weights")}
        return [t for t in moments + mains if t.untyped_storage().data_ptr() not in weights]
