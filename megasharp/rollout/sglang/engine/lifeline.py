"""No process of an engine outlives its first one.

SGLang asks the kernel for that too, but only after its imports, which take long: a first process that ends before is
missed, and the child waits for messages for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Not multiprocessing's parent_process(): that is not known yet while a spawned child imports its function's module.
_VARIABLE = "MEGASHARP_ENGINE_PID"


def publish() -> None:
    """This is the engine's first process: the children that start from now on find it in their environment."""
    os.environ[_VARIABLE] = str(os.getpid())


def end_with_parent() -> None:
    """In a child of the engine's first process: have the kernel kill it when that ends; exit where it has ended.

    Does nothing in the first process itself, and where none was published.
    """
    parent = int(os.environ.get(_VARIABLE, os.getpid()))
    if sys.platform != "linux" or parent == os.getpid():
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
