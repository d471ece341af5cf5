"""Megatron's import without what this house never uses of it: some two seconds of every start of every process.

Megatron imports Weights & Biases where it is installed, for its own inference engine. And it decorates its fused
functions with torch.compile, which brings all of torch's compiler in; without CUDA none of those functions is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _as_it_is(function: Callable[..., Any] | None = None, **options: object) -> Any:
    """What stands for torch.compile: the function itself, also where it is called with options first."""
    return _as_it_is if function is None else function


@contextmanager
def lean() -> Iterator[None]:
    """While the block imports Megatron; a module that the process already has is left alone."""
    compile_, wandb_is_there = torch.compile, "wandb" in sys.modules
    if not torch.cuda.is_available():
        torch.compile = _as_it_is  # type: ignore[assignment]
    if not wandb_is_there:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # an import of it fails, as where it is not installed
    try:
        yield
    finally:
        torch.compile = compile_
        if not wandb_is_there:
            del sys.modules["wandb"]
