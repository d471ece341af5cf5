"""Standard output and error of a command that goes on without them.

A reader may be gone (`| head`, a lost terminal), the disk that a redirect goes to may be full, a stream may be closed
from the start, or nobody may read a pipe that is full (`| less`, Ctrl-S). None of this may end or hold up a run.
`outlive` puts streams in place of `sys.stdout` and `sys.stderr` that try, wait a little for a reader, and otherwise
keep the text for the attempt's log. `log_to` names that log, `console.log`, and points descriptors 1 and 2 at it: a
library's C code and child processes, which know nothing of these streams, then write to a file too.

No thread writes: a line that nobody takes within two seconds goes to the log, and while that lasts no later line waits.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from megasharp.common.terminal import guard_streams

CONSOLE_FILE = "console.log"
_PATIENCE_S = 2.0
# The kernel takes or refuses a write of this size to a pipe as a whole.
_PIECE = 4096
# Of what is lost; months of progress lines are less.
_MOST_BYTES = 64 << 20


class _Log:
    """Takes what could not be written: in memory until `open_in` names a folder. It never fails either."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._early = bytearray()
        self._left = _MOST_BYTES

    def open_in(self, folder: Path) -> int:
        """Return a descriptor of the log, /dev/null where it cannot be made."""
        try:
            self._file = os.open(folder / CONSOLE_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:
            return os.open(os.devnull, os.O_WRONLY)
        early, self._early = bytes(self._early), bytearray()
        self.add(early)
        return os.dup(self._file)

    def add(self, data: bytes) -> None:
        """Keep `data`, unless there is too much by now."""
        data = data[: self._left]
        self._left -= len(data)
        if self._file is None:
            self._early += data
            return
        with suppress(OSError):
            os.write(self._file, data)


class _Outlet(io.RawIOBase):
    """Descriptor `number`, which the command may lose without noticing; None: it was closed from the start."""

    # Both streams may be one pipe, and a thread that writes between another's look and write could make it wait.
    _lock = threading.RLock()

    def __init__(self, label: str, number: int | None, log: _Log) -> None:
        self._label = label
        self._number = number
        self._log = log
        self._waits = True
        self.other: _Outlet | None = None
        self.is_lost = False

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._number is not None and os.isatty(self._number)

    def fileno(self) -> int:
        """Return the descriptor. Raises OSError where there is none."""
        if self._number is None:
            raise io.UnsupportedOperation("fileno")
        return self._number

    def write(self, data: Any, /) -> int:
        """Write, or keep what is not taken; returns the length of `data` always."""
        view = memoryview(data).cast("B")
        with self._lock:
            written, problem = self._try(view)
            if problem is None:
                self._waits = True
            else:
                self._lose(bytes(view[written:]), problem)
        return len(view)

    def _try(self, view: memoryview) -> tuple[int, str | None]:
        """Write as much as is taken; return its length, and the problem with the rest."""
        if self._number is None:
            return 0, "it was closed when the command started"
        written, until = 0, time.monotonic() + (_PATIENCE_S if self._waits else 0.0)
        place = select.poll()
        place.register(self._number, select.POLLOUT)
        while written < len(view):
            try:
                if place.poll(max(0.0, until - time.monotonic()) * 1000):
                    written += os.write(self._number, view[written : written + _PIECE])
                    continue
            except BlockingIOError:
                time.sleep(0.01)
            except OSError as error:
                return written, error.strerror or str(error)
            if time.monotonic() >= until:
                self._waits = False
                return written, f"nobody has read it for {_PATIENCE_S:g} s"
        return written, None

    def _lose(self, data: bytes, problem: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            line = f"{self._label} cannot be written: {problem}; the command goes on, and"
            self._log.add(f"megasharp: note: {line} what it writes there follows\n".encode())
            if self.other is not None and not self.other.is_lost:
                where = f"a run keeps its lines in logs/attempt_K/{CONSOLE_FILE}"
                # Where it fails too, that is noted with the first line of its own.
                self.other._try(memoryview(f"megasharp: note: {line} {where}\n".encode()))
        self._log.add(data)


class _State:
    log: _Log | None = None
    outlets: tuple[_Outlet, ...] = ()


def fill_closed() -> None:
    """Open /dev/null in place of standard streams that were closed when the process started.

    Otherwise the next file that is opened would become standard output, and what is printed would get into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
    # Text for nobody. Python has None for a stream that was closed.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115


def outlive() -> None:
    """Make standard output and error streams that never fail and never hold the command up, until the process ends.

    A stream that stands for neither descriptor, as a test's, stays.
    """
    log = _Log()
    outlets = [_replaced(name, number, log) for name, number in (("stdout", 1), ("stderr", 2))]
    guard_streams()
    if None not in outlets:
        _State.log, _State.outlets = log, tuple(outlet for outlet in outlets if outlet is not None)
        out, error = _State.outlets
        out.other, error.other = error, out


def _replaced(name: str, number: int, log: _Log) -> _Outlet | None:
    stream: TextIO = getattr(sys, name)
    with suppress(OSError, ValueError):
        stream.flush()
    try:
        closed = stream.name == os.devnull
        if not closed and stream.fileno() != number:
            return None
    except (OSError, AttributeError):
        return None
    label = {"stdout": "standard output", "stderr": "standard error"}[name]
    outlet = _Outlet(label, None if closed else _without_waiting(number), log)
    # A character that the console's encoding lacks must not end a run either.
    text = io.TextIOWrapper(
        io.BufferedWriter(outlet), encoding=stream.encoding, errors="backslashreplace", line_buffering=True
    )
    setattr(sys, name, text)
    return outlet


def _without_waiting(number: int) -> int:
    """Open a pipe or terminal again for writes that do not wait: the flag would hold for all who share the old one."""
    mode = os.fstat(number).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        # Not allowed where it is another user's: then only a write that races with another process may wait.
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return os.dup(number)


def log_to(folder: Path) -> None:
    """Keep in `folder` what could not be written, and all that passes the streams by: C code, child processes."""
    if _State.log is None:
        return
    log = _State.log.open_in(folder)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)


def outlives() -> bool:
    """Return whether the streams of `outlive` are in place."""
    return bool(_State.outlets)


def is_lost() -> bool:
    """Return whether standard output has failed to take something."""
    return outlives() and _State.outlets[0].is_lost


def error_stream() -> int | None:
    """Return the descriptor of standard error for a child whose words the user must see; None: it inherits it."""
    if not outlives():
        return None
    with suppress(OSError):
        return _State.outlets[1].fileno()
    return None
