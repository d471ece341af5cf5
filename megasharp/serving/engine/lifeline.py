"""No process of an engine outlives its parent.

SGLang asks the kernel for that too, but only after its imports, which take long: a parent that ends before is missed,
and the child waits for messages for ever.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this child when its parent ends; ends it now where that has happened already."""
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        sys.exit(1)
