"""Processes that end with their parent, however it ends: the kernel sends them a signal (Linux; elsewhere nothing)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

_PR_SET_PDEATHSIG = 1


def ended_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Return a `preexec_fn` for subprocess: the child gets signal `number` when this process ends.

    Only for a process of one thread: the function runs between fork and exec.
    """
    # Loaded before the fork.
    return partial(_ask_the_kernel, _library(), os.getpid(), number)


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process signal `number` when its parent, process `parent`, ends; exit if it has."""
    _ask_the_kernel(_library(), parent, number)


def _library() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _ask_the_kernel(library: Any, parent: int, number: signal.Signals) -> None:
    if library is not None:
        library.prctl(_PR_SET_PDEATHSIG, number)
        # It may have ended before the call.
        if os.getppid() != parent:
            os._exit(1)
