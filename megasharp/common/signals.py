"""Signals of a command: the first SIGTERM, Ctrl-C or hang-up of its terminal raises `Stopped` in the main thread.

Later ones are ignored, so that everything is closed completely on the way out. In a `held` section a signal waits for
the end. `arrived` says afterwards whether one came, because libraries replace or drop an exception that they do not
expect.

SIGUSR1 (`save_heard`) means that time is nearly up: a run that receives it saves and ends. So does the SIGTERM that
`ray job stop` sends to a job's driver. Another thread may also find that the run has failed (`fail`): its error is
raised in the main thread like a signal's.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from types import FrameType, TracebackType

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVE = signal.SIGUSR1
# Ray sets it for a job's entrypoint.
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# Wakes the main thread of a driver from a system call; in ranks it asks for stacks.
_WAKE = signal.SIGUSR2
# EX_TEMPFAIL of sysexits.h, a temporary failure: whoever started the command may start it again.
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
    """A request to save has arrived: raised where nothing is lost by it, for a run that then saves and ends."""


class TimeIsUp(SystemExit):
    """A run has saved because a signal asked for it, and wants to be started again; exit code 75."""

    def __init__(self, line: str) -> None:
        super().__init__(AGAIN)
        self.line = line

    def __str__(self) -> str:
        return self.line


class _State:
    """Signals that this process has received; `holds` counts the `held` sections that the main thread is in.

    `late`: the signal came while the command was closing after an error, so the error ended it. `waiting`: a signal or
    failure came inside a `held` section. `save`: the signal that asked for a save. `at_once`: the main thread is in an
    `interruptible` section. `failure`: the error that another thread found.
    """

    arrived: signal.Signals | None = None
    late: bool = False
    waiting: bool = False
    holds: int = 0
    save: signal.Signals | None = None
    at_once: bool = False
    failure: BaseException | None = None


def arrived() -> signal.Signals | None:
    """Return the signal that ends this command; None while there was none, and where an error had ended it before."""
    return None if _State.late else _State.arrived


def check() -> None:
    """Raise `Stopped` if a signal has arrived: for places that must not be passed when its exception was lost.

    The error that another thread found is raised too.
    """
    number = arrived()
    if number is not None:
        raise Stopped(number)
    if _State.failure is not None:
        raise _State.failure


def heard() -> tuple[signal.Signals, ...]:
    """Return the signals to handle: without a hang-up that `nohup` has had ignored, so that the command goes on."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return tuple(number for number in NUMBERS if number not in ignored)


@contextmanager
def handled() -> Iterator[None]:
    """Handle signals inside the block. After one has arrived they are ignored: the process is about to end."""
    before = {number: signal.signal(number, _handle) for number in heard()}
    try:
        yield
        check()
    finally:
        for number, handler in before.items():
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
    """Delay a signal that arrives inside the block to its end."""
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
    """Let `interrupt` raise in the main thread the error given to `fail`; within `held`, at that section's end."""
    before = signal.signal(_WAKE, _wake)
    try:
        yield
    finally:
        signal.signal(_WAKE, before if _State.failure is None else signal.SIG_IGN)


def fail(error: BaseException) -> None:
    """Record, from another thread, that the run has failed, whatever the main thread makes of it."""
    _State.failure = error


def failure() -> BaseException | None:
    """Return the error that another thread found, which is then the cause of all other errors."""
    return _State.failure


def interrupt() -> None:
    """Raise, from another thread, the error given to `fail` in the main thread as soon as that runs Python code."""
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


def save_numbers(*, ray: bool) -> tuple[signal.Signals, ...]:
    """Return the signals that ask a run to save; `ray`: its ranks are Ray's processes.

    Ray sends SIGTERM to all processes below the driver's, so ranks that are its children could not save.
    """
    return (SAVE, signal.SIGTERM) if ray and _RAY_JOB in os.environ else (SAVE,)


@contextmanager
def save_heard(numbers: Sequence[signal.Signals] = (SAVE,)) -> Iterator[None]:
    """Take these signals as a request to save inside the block; afterwards ignore them: the command is about to end.

    Where the process that started this one has blocked them, they are unblocked.
    """
    before = {number: signal.signal(number, _hear) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield
    finally:
        for number, handler in before.items():
            # Threads that began inside would let it end the process, though the main thread holds it back again.
            ignored = _State.save is not None or handler is signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if ignored else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _hear(number: int, _: FrameType | None) -> None:
    first = _State.save is None
    _State.save = _State.save or signal.Signals(number)
    # The first signal's interruption is still unwinding, which a second one must not cut short.
    if first and _State.at_once and not _State.holds:
        raise SaveAsked


def save_asked() -> signal.Signals | None:
    """Return the signal that asked for a save."""
    return _State.save


def check_save() -> None:
    """Raise `SaveAsked` if a request to save has arrived."""
    if _State.save is not None:
        raise SaveAsked


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a request to save raise `SaveAsked` at once inside: for long work that a resumed run does again."""
    check_save()
    _State.at_once = True
    try:
        yield
    finally:
        _State.at_once = False


@contextmanager
def saves_wait() -> Iterator[None]:
    """Within `interruptible`, let a request to save wait for the block's end: for a call that must be answered."""
    before, _State.at_once = _State.at_once, False
    try:
        yield
    finally:
        _State.at_once = before
    if before and not _State.holds:
        check_save()
    if before:
        check_save()


@contextmanager
def save_kept_from_children() -> Iterator[None]:
    """Start processes with SIGUSR1 blocked: Slurm sends it to all of a job, and it would end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {SAVE})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Start processes with SIGUSR1 and a terminal's interrupt blocked: this process decides when they end."""
    with save_kept_from_children():
        # multiprocessing starts its tracker with the first child and then unblocks interrupts: start it before.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield


class ClosingStack(ExitStack):
    """An ExitStack that no signal cuts short: all of it is undone before the signal is raised."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool:
        failed = error is not None and _State.arrived is None
        with held():
            try:
                return bool(super().__exit__(kind, error, trace))
            finally:
                _State.late = _State.late or (failed and _State.arrived is not None)
