"""Unmodified Megatron-core on a machine without CUDA, over gloo.

Megatron writes `device="cuda"`, `torch.cuda.current_device()` and compares tensor type strings with `torch.cuda.*`.
Inside `on_cpu()` and `beside_cuda()` those calls are routed to the CPU; outside of them torch is as it was. What is
routed, and why it is enough, was found by running megatron-core 0.16 and 0.19 at TP, PP, SP and DP above one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megasharp.ops.linear import product

CPU = torch.device("cpu")


def _means_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


class _CudaToCpu(TorchFunctionMode):
    """Rewrites device arguments that name CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if kwargs and _means_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to and len(args) > 1 and not isinstance(args[1], bool) and _means_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **(kwargs or {}))


class _Event:
    """A CUDA event where every operation has already ended."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def wait(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


class _Stream(_Event):
    """A CUDA stream on which everything runs at once."""

    def wait_stream(self, *args: object) -> None: ...

    def wait_event(self, *args: object) -> None: ...

    def record_event(self, *args: object) -> _Event:
        return _Event()


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _zero(*args: object, **kwargs: object) -> int:
    return 0


def _itself(self: Any, *args: object, **kwargs: object) -> Any:
    return self


def _get_rng_state(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: object, **kwargs: object) -> None:
    torch.set_rng_state(new_state)


_tensor_matmul = torch.Tensor.matmul
_tensor_type = torch.Tensor.type


def _matmul(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The faster float32 product where no gradient is recorded.

    Megatron's linear layers multiply inside autograd functions of their own, forward and backward, so that is there.
    """
    faster = None if torch.is_grad_enabled() else product(self, other)
    return _tensor_matmul(self, other) if faster is None else faster


def _type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type()` with CUDA's names: the optimizers pick fp32 and bf16 parameters by comparing them."""
    if dtype is None:
        # A function mode looks `type` up again by name, so the name may have come through here already.
        name = str(_tensor_type(self))
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)
    dtype = dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype
    return _tensor_type(self, dtype, *args, **kwargs)


_CUDA_ROUTES: dict[str, Any] = {
    "current_device": lambda: CPU,
    "synchronize": _nothing,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": torch.manual_seed,
    "Stream": _Stream,
    "Event": _Event,
    "current_stream": lambda *args: _Stream(),
    "default_stream": lambda *args: _Stream(),
    "stream": lambda stream: contextlib.nullcontext(),
    "empty_cache": _nothing,
    "memory_allocated": _zero,
    "memory_reserved": _zero,
    "max_memory_allocated": _zero,
    "max_memory_reserved": _zero,
}


def _routes() -> list[tuple[Any, str, Any]]:
    import megatron.core.tensor_parallel.random as megatron_random

    return [
        *((torch.cuda, name, value) for name, value in _CUDA_ROUTES.items()),
        (torch.cuda.nvtx, "range_push", _nothing),
        (torch.cuda.nvtx, "range_pop", _nothing),
        (torch, "matmul", _matmul),
        (torch.Tensor, "matmul", _matmul),
        (torch.Tensor, "cuda", _itself),
        (torch.Tensor, "type", _type),
        (torch.nn.Module, "cuda", _itself),
        # These two are captured at import, so routing torch.cuda does not reach them.
        (megatron_random, "_get_cuda_rng_state", _get_rng_state),
        (megatron_random, "_set_cuda_rng_state", _set_rng_state),
    ]


_active = threading.local()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Route CUDA to the CPU while the block runs; may be nested. Refused where CUDA is present."""
    if torch.cuda.is_available():
        raise RuntimeError("on_cpu() is for machines without CUDA; here CUDA is available")
    with beside_cuda():
        yield


@contextlib.contextmanager
def beside_cuda() -> Iterator[None]:
    """The same wherever there is CUDA too: its GPUs are not touched, which may be another program's."""
    if getattr(_active, "on", False):
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, value in _routes():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_CudaToCpu())
        stack.callback(setattr, _active, "on", False)
        _active.on = True
        yield
