"""Import Megatron without the modules that are never used here: it saves every process four seconds at its start.

Megatron imports Weights & Biases and torch's TensorBoard writer where they are installed, for its own inference engine
and timers. Without CUDA more can stay away. Megatron decorates its fused functions with torch.compile, which imports
all of torch's compiler. Megatron 0.16 also imports Triton for kernels, and DTensor, with sympy below it, for FSDP. None
of these is called on a CPU; torch's checkpoint code, which needs DTensor too, is imported when a checkpoint is written
or read. Later versions of Megatron fail without these three.
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
    """A module whose names are looked up in the real one, which is imported when the first one is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


class _Checkpoint(ModuleType):
    """The part of torch's checkpoint code that Megatron's optimizers import: one module, used with FSDP only."""

    default_planner = _ImportedLate(f"{_CHECKPOINT}.default_planner")


def _as_it_is(function: Callable[..., Any] | None = None, **options: object) -> Any:
    """Stand in for torch.compile: return the function itself, also where options come first."""
    return _as_it_is if function is None else function


@contextmanager
def lean() -> Iterator[None]:
    """Hide the unused modules while the block imports Megatron; one that the process already has is left alone."""
    compile_, with_cuda = torch.compile, torch.cuda.is_available()
    if not with_cuda:
        torch.compile = _as_it_is  # type: ignore[assignment]
    names: tuple[str, ...] = _NEVER_USED
    if not with_cuda and importlib.metadata.version("megatron-core").startswith("0.16."):
        names += _USED_WITH_CUDA_BY_0_16
    # Importing a module that is None here fails, as if it were not installed.
    hidden = {name: _Checkpoint(name) if name == _CHECKPOINT else None for name in names if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.compile = compile_
        for name in hidden:
            del sys.modules[name]
