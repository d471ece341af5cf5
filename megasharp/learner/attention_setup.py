"""Takes up a process's kernels of attention: for its card and models, put in place, tried, the same on all ranks.

A registration is the whole process's, so that all its learners have the same kernels. What was built for another torch
or another card shows when it is imported or called. So kernels that are not torch's own are first tried on a few rows
with the models' heads, forward and backward, against exact attention: with `auto` a failure leaves the next kernels, or
else ends the run in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megasharp.common.errors import one_line
from megasharp.common.records import Segments
from megasharp.learner.attention import attend
from megasharp.learner.packed import packed_rows
from megasharp.ops.attention_kernels import REGISTERED, KernelName, Kernels, Site, Wanted, choose, software_here

_FA4_INTERFACE = "megasharp.learner.fa4_interface"
# A trial: two prompts' lengths and their responses', longer and shorter than the kernels' tiles.
_RUNS = ((150, -1), (300, 0), (1, 0), (70, -1))
_WINDOW = 64
# Relative; bfloat16 attention is some thousandths off.
_LARGEST_ERROR = 0.03
_RESULTS = ("output", "gradient by queries", "gradient by keys", "gradient by values")


@dataclass(frozen=True, slots=True)
class Shape:
    """One rank's part of a model's attention, its smallest sliding window, and a memory network's response window."""

    heads: int
    groups: int
    head_dim: int
    window: int | None = None
    response_window: int | None = None


def take_up(
    wanted: Wanted, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device, deterministic: bool = False
) -> Kernels:
    """Choose the kernels of this process and put them in place; every rank must call it.

    `shapes` are of all its models. Raises UserError on every rank where `wanted` cannot be used.
    """
    gpu = device.type == "cuda"
    site = Site(
        gpu=gpu,
        dtype=str(dtype).removeprefix("torch."),
        head_dims=tuple(sorted({shape.head_dim for shape in shapes})),
        windows=any(shape.window is not None for shape in shapes),
        response_window=any(shape.response_window is not None for shape in shapes),
        deterministic=deterministic,
        capability=torch.cuda.get_device_capability(device) if gpu else None,
    )
    software, failed = software_here(), dict[KernelName, str]()
    while True:
        kernels = choose(wanted, site, software, failed)
        if not gpu:
            return kernels
        problems = _of_all_ranks(kernels.name, _problem(kernels.name, shapes, dtype, device))
        if not problems:
            return kernels
        failed |= problems


def _problem(name: KernelName, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> str:
    """Put kernels in place; return why they do not work, empty where they do."""
    try:
        put_in_place(name)
        if name not in ("fa2", "blocks"):
            for shape in shapes:
                tried(shape, dtype, device, by_engine=name == "te")
    # The libraries raise what they like: ImportError, RuntimeError, AssertionError, the compiler's own.
    except Exception as error:
        return f"it does not work here ({type(error).__name__}: {one_line(error)})"
    return ""


def _of_all_ranks(name: KernelName, problem: str) -> dict[KernelName, str]:
    """Return what failed on any rank; where ranks have chosen differently, also what not all of them have."""
    if dist.get_world_size() == 1:
        return {name: problem} if problem else {}
    found: list[tuple[KernelName, str]] = [(name, problem)] * dist.get_world_size()
    dist.all_gather_object(found, (name, problem))
    problems = {its: f"on rank {rank} {text}" for rank, (its, text) in reversed(list(enumerate(found))) if text}
    # From the best to what every rank has.
    best = min((its for its, _ in found), key=("fa3", "fa4", "te", "fa2", "blocks").index)
    without = next((rank for rank, (its, _) in enumerate(found) if its != best), None)
    return problems if without is None else {best: f"rank {without} has {found[without][0]} alone", **problems}


def put_in_place(name: KernelName) -> None:
    """Register FA3's or FA4's kernels under torch's operators, or give these back to FA2.

    Raises what their import does.
    """
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        return
    if name == "fa4":
        from torch.nn.attention import _fa4

        own = partial(_fa4.register_flash_attention_fa4, module_path=_FA4_INTERFACE)
        torch.nn.attention.register_flash_attention_impl("FA4", register_fn=own)
    if name in REGISTERED:
        torch.nn.attention.activate_flash_attention_impl(REGISTERED[name])
    elif torch.nn.attention.current_flash_attention_impl() is not None:
        torch.nn.attention.restore_flash_attention_impl()


def tried(shape: Shape, dtype: torch.dtype, device: torch.device, by_engine: bool = False) -> None:
    """Compare the kernels in place with exact attention in float32, gradients too. Raises ValueError where they differ.

    Draws from no generator that a run draws from.
    """
    lengths = torch.tensor([length for length, _ in _RUNS])
    segments = Segments(lengths.cumsum(0) - lengths, lengths, torch.tensor([prefix for _, prefix in _RUNS]))
    rows, window = int(lengths.sum()), None if shape.window is None else min(max(shape.window, 2), _WINDOW)
    generator = torch.Generator().manual_seed(0)
    of_keys = rows, shape.groups, shape.head_dim
    sizes = (rows, shape.heads, shape.head_dim), of_keys, of_keys, (rows, shape.heads * shape.head_dim)
    # Rounded once, so that both compute from the same numbers.
    *given, cotangent = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    tables = torch.empty(rows, 1, device=device)
    response = None if shape.response_window is None else min(shape.response_window, _WINDOW)

    def results(dtype: torch.dtype, engine: bool, its_window: int | None, response: int | None) -> list[Tensor]:
        query, key, value = tensors = [x.to(dtype).detach().requires_grad_() for x in given]
        packed = packed_rows(segments, tables, tables, response_window=response)
        with torch.enable_grad():
            out = attend(query, key, value, packed, its_window, None, engine)
        return [out, *torch.autograd.grad(out, tensors, cotangent.to(dtype))]

    for windows in {(None, None), (window, None), (None, response)}:
        found = results(dtype, by_engine, *windows)
        # In float32 it is attended in blocks, here by plain products.
        with sdpa_kernel(SDPBackend.MATH):
            exact = results(torch.float32, False, *windows)
        for name, mine, true in zip(_RESULTS, found, exact, strict=True):
            error = float((mine.detach().float() - true.detach()).norm() / true.detach().norm())
            if not error < _LARGEST_ERROR:
                raise ValueError(f"its {name} is {100 * error:.1f} % off with windows {windows}")
