"""Megatron's import without what this house does not use of it: some four seconds of every start of every process.

Megatron imports Weights & Biases and torch's TensorBoard writer where they are installed, for its own inference engine
and timers. Without CUDA it does with less still: it decorates its fused functions with torch.compile, which brings all
of torch's compiler in. Megatron 0.16 also imports Triton for kernels, and DTensor, with sympy below it, for FSDP. None
of these is called on a CPU; torch's checkpoint code, which needs DTensor too, is imported when a checkpoint is written
or read. Later versions need all three to be imported at all.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_CHECKPOINT = "torch.distributed.checkpoint"
_NEVER_USED = ("wandb", "torch.utils.tensorboard")
_USED_WITH_CUDA_BY_0_16 = ("triton", "torch.distributed._tensor", "torch.distributed.tensor", _CHECKPOINT)


class _ImportedLate(ModuleType):
    """A module whose names are looked up in the real one, imported by then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


class _Checkpoint(ModuleType):
    """What Megatron's optimizers import of torch's checkpoint code: one module, used with FSDP only."""

    default_planner = _ImportedLate(f"{_CHECKPOINT}.default_planner")


def _as_it_is(function: Callable[..., Any] | None = None, **options: object) -> Any:
    """What stands for torch.compile: the function itself, also where it is called with options first."""
    return _as_it_is if function is None else function


@contextmanager
def lean() -> Iterator[None]:
    """While the block imports Megatron; a module that the process already has is left alone."""
    compile_, with_cuda = torch.compile, torch.cuda.is_available()
    if not with_cuda:
        torch.compile = _as_it_is  # type: ignore[assignment]
    names: tuple[str, ...] = _NEVER_USED
    if not with_cuda and importlib.metadata.version("megatron-core").startswith("0.16."):
        names += _USED_WITH_CUDA_BY_0_16
    # An import of what is None fails, as where it is not installed.
    hidden = {name: _Checkpoint(name) if name == _CHECKPOINT else None for name in names if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.compile = compile_
        for name in hidden:
            del sys.modules[name]
