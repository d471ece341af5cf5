"""Unmodified Megatron-core on a machine without CUDA, over gloo, and Adam where no fused one is installed.

Megatron writes `device="cuda"`, `torch.cuda.current_device()` and compares tensor type strings with `torch.cuda.*`.
Inside `on_cpu()` and `beside_cuda()` those calls are routed to the CPU; outside of them torch is as it was. The routes
were found by running megatron-core 0.16 and 0.19 at TP, PP, SP and DP above one. `device="cuda"` is written where a
step is scheduled, its gradients are reduced and the model is built, not in a model's pass.

The fused optimizers (Transformer Engine's, NVIDIA apex's) keep the step count in the parameter group; torch's keeps it
beside the moments of each parameter. Megatron's fallback for torch's Adam saves its state but cannot load it
(`KeyError: 'step'` in 0.16). `Adam` keeps the count in the group, so Megatron's own load path is right.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megasharp.ops.chunked_head import product


class Adam(torch.optim.Optimizer):
    """Adam with decoupled (`adam_w_mode`) or coupled weight decay, and bias correction (arXiv 1412.6980, 1711.05101).

    On a GPU one of torch's kernels updates all of a parameter at once. On a CPU its grouped operations do, whose bits
    the recorded curves have; they need memory for one more copy of the parameters.
    """

    # torch decorates these to keep them out of compiled graphs, for which it imports its compiler: a second of CPU.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        # Megatron 0.19 passes it to every Adam; it asks for CUDA graphs, which this one does not support.
        assert not capturable
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, in place; return what `closure` returns."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        gradients = [p.grad for p in params if p.grad is not None]
        moments = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        self._apply(group, params, gradients, moments, squares)

    def _apply(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        gradients: list[Tensor],
        moments: list[Tensor],
        squares: list[Tensor],
    ) -> None:
        """Update parameters and moments in place; the group's step count is already that of this step."""
        beta1, beta2 = group["betas"]
        lr, step = group["lr"], group["step"]
        if params[0].is_cuda:
            self._update_fused(group, params, gradients, moments, squares)
            return
        if group["weight_decay"] and self.adam_w_mode:
            torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, params, alpha=group["weight_decay"]))
        torch._foreach_lerp_(moments, gradients, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1.0 - beta2**step) ** 0.5)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, moments, denominators, -lr / (1.0 - beta1**step))

    def _update_fused(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        gradients: list[Tensor],
        moments: list[Tensor],
        squares: list[Tensor],
    ) -> None:
        # Filled on the GPU: a number copied there would wait for all that came before.
        step = torch.full((), float(group["step"]), device=params[0].device)
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        update(
            params,
            gradients,
            moments,
            squares,
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def use_where_nothing_is_fused() -> None:
    """Make Megatron's optimizers use `Adam` where neither Transformer Engine nor apex is installed."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.distrib_optimizer as distributed

    if not optimizers.USING_PYTORCH_OPTIMIZER:
        return
    optimizers.Adam = Adam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distributed.Adam = Adam
    distributed.HAVE_APEX_OR_TE = True
    distributed.USING_APEX_OPTIMIZER = True


CPU = torch.device("cpu")

# Names of glibc's malloc.h, and values in bytes. Below the first size memory comes from the heap, which grows by the
# second, and whose end goes back to the system where more than the third is free.
_MMAP_THRESHOLD, _TOP_PAD, _TRIM_THRESHOLD = (-3, 256 * 2**20), (-2, 32 * 2**20), (-1, 512 * 2**20)


def reuse_freed_memory() -> None:
    """Let this process reuse freed memory rather than return it to the system and have it zeroed again, page by page.

    Tensors of a step are of the sizes that glibc maps and unmaps each time. Does nothing where malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_MMAP_THRESHOLD, _TOP_PAD, _TRIM_THRESHOLD):
            mallopt(*parameter)


def return_freed_memory() -> None:
    """Return to the system what `reuse_freed_memory` keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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


def _without_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function during which calls of torch do not pass through Python first."""

    @functools.wraps(function)
    def direct(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return direct


class _Event:
    """A CUDA event where every operation has already ended."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def wait(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """Return True: all work before the event has ended."""
        return True

    def elapsed_time(self, end: object) -> float:
        """Return 0.0 ms, since nothing is timed."""
        return 0.0


class _Stream(_Event):
    """A CUDA stream on which everything runs at once."""

    def wait_stream(self, *args: object) -> None: ...

    def wait_event(self, *args: object) -> None: ...

    def record_event(self, *args: object) -> _Event:
        """Return a new event, which has happened."""
        return _Event()


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _zero(*args: object, **kwargs: object) -> int:
    return 0


def _itself(self: Any, *args: object, **kwargs: object) -> Any:
    return self


def _on_cpu(tensor: Any, as_numpy: bool = False, **kwargs: object) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _get_rng_state(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: object, **kwargs: object) -> None:
    torch.set_rng_state(new_state)


_gather_equal = mappings._gather_along_first_dim
_reduce_scatter_equal = mappings._reduce_scatter_along_first_dim
_tensor_matmul = torch.Tensor.matmul
_tensor_type = torch.Tensor.type


def _matmul(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Multiply by the faster float32 product where no gradient is recorded.

    Megatron's linear layers multiply inside autograd functions of their own, forward and backward: nothing is recorded
    there.
    """
    faster = None if torch.is_grad_enabled() else product(self, other)
    return _tensor_matmul(self, other) if faster is None else faster


def _type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `Tensor.type()` with CUDA's names, by which the optimizers pick fp32 and bf16 parameters."""
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


def _gather(
    input_: Tensor, group: dist.ProcessGroup, output_split_sizes: Sequence[int] | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Gather parts of unequal lengths, which gloo cannot, by filling all up to the longest."""
    if output_split_sizes is None or group.size() == 1:
        whole: Tensor = _gather_equal(input_, group, output_split_sizes, *args, **kwargs)
        return whole
    lengths = [int(length) for length in output_split_sizes]
    filled = input_.new_zeros(max(lengths), *input_.shape[1:])
    filled[: len(input_)] = input_
    parts = [torch.empty_like(filled) for _ in lengths]
    dist.all_gather(parts, filled, group=group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _reduce_scatter(
    input_: Tensor, group: dist.ProcessGroup, input_split_sizes: Sequence[int] | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Sum parts of unequal lengths over ranks and keep this rank's: gloo cannot scatter them."""
    if input_split_sizes is None or group.size() == 1:
        own: Tensor = _reduce_scatter_equal(input_, group, input_split_sizes, *args, **kwargs)
        return own
    total = input_.clone()
    dist.all_reduce(total, group=group)
    part: Tensor = torch.split(total, [int(length) for length in input_split_sizes])[group.rank()]
    return part.contiguous()


def _routes() -> list[tuple[Any, str, Any]]:
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    return [
        *((torch.cuda, name, value) for name, value in _CUDA_ROUTES.items()),
        (torch.cuda.nvtx, "range_push", _nothing),
        (torch.cuda.nvtx, "range_pop", _nothing),
        (torch, "matmul", _matmul),
        (torch.Tensor, "matmul", _matmul),
        (torch.Tensor, "cuda", _itself),
        (torch.Tensor, "type", _type),
        (torch.nn.Module, "cuda", _itself),
        # It leaves what is on the CPU as it is, though its callers want NumPy's arrays.
        (token_dispatcher, "maybe_move_tensor_to_cpu", _on_cpu),
        # Parts of experts get tokens by number.
        (mappings, "_gather_along_first_dim", _gather),
        (mappings, "_reduce_scatter_along_first_dim", _reduce_scatter),
        # These two are captured at import, so routing torch.cuda does not reach them.
        (megatron_random, "_get_cuda_rng_state", _get_rng_state),
        (megatron_random, "_set_cuda_rng_state", _set_rng_state),
    ]


_active = threading.local()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Route CUDA to the CPU while the block runs; may be nested. Raises RuntimeError where CUDA is available."""
    if torch.cuda.is_available():
        raise RuntimeError("on_cpu() is for machines without CUDA; here CUDA is available")
    with beside_cuda():
        yield


@contextlib.contextmanager
def beside_cuda() -> Iterator[None]:
    """Do as `on_cpu`, on a machine with GPUs too: they are not touched, since another program may use them."""
    if getattr(_active, "on", False):
        yield
        return
    import megatron.core.pipeline_parallel.schedules as schedules

    # A micro-batch's passes make thousands of calls of torch, which take a microsecond more each in the mode.
    passes = [(schedules, name, _without_mode(getattr(schedules, name))) for name in ("forward_step", "backward_step")]
    with contextlib.ExitStack() as stack:
        for owner, name, value in [*_routes(), *passes]:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_CudaToCpu())
        stack.callback(setattr, _active, "on", False)
        _active.on = True
        yield
