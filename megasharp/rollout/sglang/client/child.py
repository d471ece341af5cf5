"""Becomes an engine: `python child.py PARENT_PID COMMAND...` ties itself to its parent, then executes the command.

The kernel is asked to kill this process when the parent ends, however it ends; that outlives the exec. A program of its
own, of the standard library only: it runs in the engine's Python, and nothing of ours may run between fork and exec in
a parent that has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Execute the command and never return; exits where the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
