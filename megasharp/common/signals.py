"""How a command ends by a signal: the first SIGTERM or Ctrl-C raises `Stopped` in the main thread.

Later ones are ignored, so whatever is closed on the way out is closed whole. What must not be cut short before that is
`held`: a signal waits for it. `arrived` tells afterwards, because libraries turn an exception that comes out of nowhere
into another, or drop it.

SIGUSR1 is another matter (`save_heard`): time is nearly up, and a run that hears it saves where it stands. And another
thread may find that the run has failed (`fail`): its error is raised in the main thread as a signal's is.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from types import FrameType, TracebackType

NUMBERS = (signal.SIGTERM, signal.SIGINT)
SAVE = signal.SIGUSR1
# What wakes the main thread of a driver from a system call; in ranks it asks for stacks.
_WAKE = signal.SIGUSR2
# What sysexits.h calls a temporary failure: whoever started the command may start it again.
AGAIN = 75


class Stopped(SystemExit):
    """A signal ended the command; exit code 128 + its number. `advice` says how to go on."""

    def __init__(self, number: signal.Signals, advice: str = "") -> None:
        super().__init__(128 + number)
        self.number = number
        self.advice = advice

    def __str__(self) -> str:
        what = "interrupted" if self.number == signal.SIGINT else f"stopped by {self.number.name}"
        return f"{what}; {self.advice}" if self.advice else what


class SaveAsked(BaseException):
    """SIGUSR1 has arrived: raised where nothing is lost by it, for a run that then saves and ends."""


class TimeIsUp(SystemExit):
    """A run has saved because SIGUSR1 asked for it, and wants to be started again; exit code 75."""

    def __init__(self, line: str) -> None:
        super().__init__(AGAIN)
        self.line = line

    def __str__(self) -> str:
        return self.line


class _State:
    """What this process has got; `holds` counts the `held` sections that the main thread is in.

    `late`: the signal came while the command was closed for an error, which is then what ended it.
    `save`: SIGUSR1 has arrived; `at_once`: the main thread is in an `interruptible` section. `failure`: what another
    thread found.
    """

    arrived: signal.Signals | None = None
    late: bool = False
    waiting: bool = False
    holds: int = 0
    save: bool = False
    at_once: bool = False
    failure: BaseException | None = None


def arrived() -> signal.Signals | None:
    """The signal that ends this command; None while there was none, and where an error had ended it before."""
    return None if _State.late else _State.arrived


def check() -> None:
    """Raise `Stopped` if a signal has arrived: for places that must not be passed when its exception was lost.

    What another thread found is raised too.
    """
    number = arrived()
    if number is not None:
        raise Stopped(number)
    if _State.failure is not None:
        raise _State.failure


@contextmanager
def handled() -> Iterator[None]:
    """Signals are ours inside. After one has arrived they are ignored: the process is about to end."""
    before = [signal.signal(number, _handle) for number in NUMBERS]
    try:
        yield
        check()
    finally:
        for number, handler in zip(NUMBERS, before, strict=True):
            # The interpreter gives handlers back to the system before its end, but leaves what is ignored.
            signal.signal(number, handler if _State.arrived is None else signal.SIG_IGN)


def _handle(number: int, _: FrameType | None) -> None:
    if _State.arrived is not None:
        return
    _State.arrived = signal.Signals(number)
    if _State.holds:
        _State.waiting = True
    else:
        raise Stopped(_State.arrived)


@contextmanager
def held() -> Iterator[None]:
    """A signal that arrives inside is raised at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _State.holds += 1
    try:
        yield
    finally:
        _State.holds -= 1
        if _State.waiting and not _State.holds:
            _State.waiting = False
            check()
        if _State.at_once and not _State.holds:
            check_save()


@contextmanager
def failures_heard() -> Iterator[None]:
    """Inside, `interrupt` raises in the main thread what `fail` was given; at the end of a `held` section there."""
    before = signal.signal(_WAKE, _wake)
    try:
        yield
    finally:
        signal.signal(_WAKE, before if _State.failure is None else signal.SIG_IGN)


def fail(error: BaseException) -> None:
    """From another thread: the run has failed, whatever the main thread makes of it."""
    _State.failure = error


def failure() -> BaseException | None:
    """What another thread found, which is then the cause of all other errors."""
    return _State.failure


def interrupt() -> None:
    """From another thread: raise in the main thread what `fail` was given, as soon as it runs Python code."""
    number = threading.main_thread().ident
    assert number is not None
    signal.pthread_kill(number, _WAKE)


def _wake(_: int, __: FrameType | None) -> None:
    if _State.failure is None or _State.arrived is not None:
        return
    if _State.holds:
        _State.waiting = True
    else:
        raise _State.failure


@contextmanager
def save_heard() -> Iterator[None]:
    """SIGUSR1 asks for a save inside, and afterwards it is ignored: the command is about to end, saved or done.

    Where whoever started this process has held it back, it is let through.
    """
    before = signal.signal(SAVE, _hear)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {SAVE})
    try:
        yield
    finally:
        # Threads that began inside would let it end the process, though the main thread holds it back again.
        signal.signal(SAVE, signal.SIG_IGN if _State.save or before is signal.SIG_DFL else before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _hear(_: int, __: FrameType | None) -> None:
    first = not _State.save
    _State.save = True
    # What the first one interrupted is being ended: a second must not cut that short.
    if first and _State.at_once and not _State.holds:
        raise SaveAsked


def check_save() -> None:
    """Raise `SaveAsked` if SIGUSR1 has arrived."""
    if _State.save:
        raise SaveAsked


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGUSR1 raises `SaveAsked` at once: for work that takes long and that a resumed run does again."""
    check_save()
    _State.at_once = True
    try:
        yield
    finally:
        _State.at_once = False


@contextmanager
def save_kept_from_children() -> Iterator[None]:
    """Processes started inside never hear SIGUSR1, which Slurm sends to all of a job, and which would end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {SAVE})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Nor an interrupt from the terminal: when they end is this process's to say."""
    with save_kept_from_children():
        # It is started with the first child, and lets interrupts through again then.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield


class ClosingStack(ExitStack):
    """An ExitStack that no signal cuts short: all of it is undone, and what it was left with goes on."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool:
        failed = error is not None and _State.arrived is None
        with held():
            try:
                return bool(super().__exit__(kind, error, trace))
            finally:
                _State.late = _State.late or (failed and _State.arrived is not None)
