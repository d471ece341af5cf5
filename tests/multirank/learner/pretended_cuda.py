"""A stand-in for a GPU: tensors that say they are on `cuda:0`, but lie and are computed on the CPU.

For tests on machines without CUDA: code that forgets to move a tensor, and would fail on a GPU, fails here too. What is
not shown here is anything that only CUDA does: kernels, streams, asynchronous copies, NCCL.

A tensor's device is a note about its storage. A storage made by Python on no device is on the CPU; one that torch makes
by itself, in a backward pass say, is on neither until it meets another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer import mlp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megasharp.learner import cpu_backend, parallel
from megasharp.learner.layer_spec import SwiGLU
from megasharp.ops.head import kernel_launch

GPU = torch.device("cuda", 0)
_CPU = torch.device("cpu")
# These move between devices, or read a number.
_MAY_MIX = {"aten::copy_", "aten::_local_scalar_dense", "aten::set_", "aten::set_data", "aten::_pin_memory"}


class MixedDevices(RuntimeError):
    """What torch would say of an operation between tensors on the CPU and on the GPU."""


class _Notes:
    """On which device each storage pretends to be."""

    def __init__(self) -> None:
        self._devices: dict[int, tuple[StorageWeakRef, torch.device]] = {}

    def of(self, tensor: Tensor) -> torch.device | None:
        reference = StorageWeakRef(tensor.untyped_storage())
        found = self._devices.get(reference.cdata)
        return None if found is None else found[1]

    def put(self, tensor: Tensor, device: torch.device) -> None:
        # The weak reference keeps the storage's address from being given to another one.
        reference = StorageWeakRef(tensor.untyped_storage())
        self._devices[reference.cdata] = (reference, device)


def _tensors(tree: Any) -> list[Tensor]:
    # Checkpoints are planned with tensors that have no storage of their own.
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not isinstance(leaf, ShardedTensor)]


def _is_gpu(device: object) -> bool:
    return cpu_backend._means_cuda(device)


class _Operations(TorchDispatchMode):
    """Every operation, those of backward passes too: its tensors are on one device, and so is its result."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [tensor for tensor in _tensors((args, kwargs)) if tensor.layout is torch.strided]
        devices = {note for tensor in inputs if tensor.dim() and (note := self._notes.of(tensor)) is not None}
        name = func._schema.name
        if len(devices) > 1 and name not in _MAY_MIX:
            shapes = [(tuple(tensor.shape), self._notes.of(tensor)) for tensor in inputs]
            raise MixedDevices(f"{name}: expected all tensors to be on the same device, found {shapes}")
        if not devices:
            devices = {note for tensor in inputs if (note := self._notes.of(tensor)) is not None}
        results = func(*args, **kwargs)
        if name == "aten::copy_" or (GPU not in devices and _CPU not in devices):
            return results
        for tensor in _tensors(results):
            if self._notes.of(tensor) is None:
                self._notes.put(tensor, GPU if GPU in devices else _CPU)
        return results


class _Calls(TorchFunctionMode):
    """Calls from Python that name a device, or ask for one."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], ShardedTensor):
            return func(*args, **kwargs)
        if func in (Tensor.device.__get__, Tensor.is_cuda.__get__):
            on_gpu = self._notes.of(args[0]) == GPU
            return on_gpu if func == Tensor.is_cuda.__get__ else (GPU if on_gpu else _CPU)
        if func is Tensor.pin_memory:
            return args[0]
        kwargs.pop("pin_memory", None)
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return self._moved(func, args, kwargs)
        wanted = kwargs.pop("device", None)
        result = func(*args, **kwargs)
        if wanted is not None or not _tensors((args, kwargs)):
            for tensor in _tensors(result):
                if wanted is not None or self._notes.of(tensor) is None:
                    self._notes.put(tensor, GPU if _is_gpu(wanted) else _CPU)
        return result

    def _moved(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensor, *others = args
        here = self._notes.of(tensor)
        if func is not Tensor.to:
            goal, dtype, copy = GPU if func is Tensor.cuda else _CPU, None, False
        else:
            goal, dtype, copy = self._asked(here, others, kwargs)
        out: Tensor = tensor if dtype in (None, tensor.dtype) else Tensor.to(tensor, dtype)
        if goal is None or goal == here:
            return out.clone() if copy and out is tensor else out
        out = out.clone() if out is tensor else out
        self._notes.put(out, goal)
        return out

    def _asked(
        self, here: torch.device | None, others: list[Any], kwargs: dict[str, Any]
    ) -> tuple[torch.device | None, torch.dtype | None, bool]:
        """The device, dtype and copy of a call of `Tensor.to`."""
        wanted, dtype = kwargs.get("device"), kwargs.get("dtype")
        if others and isinstance(others[0], Tensor):
            other = others.pop(0)
            wanted, dtype = self._notes.of(other) or _CPU, other.dtype
        elif others and not isinstance(others[0], torch.dtype):
            wanted = others.pop(0)
            dtype = others.pop(0) if others else dtype
        elif others:
            dtype = others.pop(0)
        copy = bool(kwargs.get("copy", others[1] if len(others) > 1 else False))
        return (here if wanted is None else GPU if _is_gpu(wanted) else _CPU), dtype, copy


class Runtime:
    """CUDA's locking of host memory: which addresses are locked, and with how many bytes; `refuses` all."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.refuses:
            self.locked[address] = size
        return 2 * self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


RUNTIME = Runtime()


def _routes() -> Iterator[tuple[Any, str, Any]]:
    for owner, name, value in cpu_backend._routes():
        # Matrix products on the CPU have a faster way there; on a GPU they are torch's own.
        if name not in ("cuda", "matmul") and not (owner is Tensor and name == "type"):
            yield owner, name, value
    yield torch.Tensor, "type", cpu_backend._type
    yield torch.cuda, "current_device", lambda: 0
    yield torch.cuda, "is_available", lambda: True
    yield torch.cuda, "device_count", lambda: 1
    yield torch.cuda, "get_device_capability", lambda device=None: (9, 0)
    yield torch.cuda, "cudart", lambda: RUNTIME
    yield torch.cuda, "set_device", lambda device: None
    # The kernel that torch.compile makes rounds less: to compare bits, ours takes its place.
    yield mlp, "bias_swiglu_impl", lambda x, *_: SwiGLU(None)(x)
    yield torch.nn.Module, "cuda", lambda self, device=None: self.to(GPU)
    yield kernel_launch, "why_not", lambda logits_TVp, topn: "there is no GPU that could run them"
    yield parallel, "_BACKENDS", {"cpu": "gloo", "cuda": "gloo"}


@contextmanager
def pretended_cuda() -> Iterator[torch.device]:
    """The pretended GPU while the block runs."""
    notes = _Notes()
    with ExitStack() as stack:
        for owner, name, value in list(_routes()):
            stack.enter_context(mock.patch.object(owner, name, value))
        # The suite hides the machine's own.
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        stack.enter_context(_Operations(notes))
        stack.enter_context(_Calls(notes))
        yield GPU


def all_on(device: torch.device, tensors: Iterable[Tensor]) -> bool:
    """Whether all of them say that they are there."""
    return all(tensor.device == device for tensor in tensors)
