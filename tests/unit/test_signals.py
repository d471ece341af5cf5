"""A signal ends a command once: raised where the main thread is, not while something is held, never twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from waiting import HANG_S, is_pending, wait_until

from megasharp.cli.train import train
from megasharp.common import signals
from megasharp.common.errors import RunFailed, StageTimeout, TrainingStopped, UserError
from megasharp.common.exit_codes import run_command


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The state and the handlers of this process as they were."""
    for name, value in (
        ("arrived", None),
        ("late", False),
        ("waiting", False),
        ("holds", 0),
        ("save", None),
        ("at_once", False),
        ("failure", None),
    ):
        monkeypatch.setattr(signals._State, name, value)
    before = {number: signal.getsignal(number) for number in (*signals.NUMBERS, signals.SAVE, signal.SIGUSR2)}
    # The tests may run under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)


def outcome(command: object, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        run_command(command)  # type: ignore[arg-type]
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGTERM, 143, "megasharp: stopped by SIGTERM\n"),
        (signal.SIGINT, 130, "megasharp: interrupted\n"),
        (signal.SIGHUP, 129, "megasharp: stopped by SIGHUP\n"),
    ],
)
def test_exit_code_and_one_line(number: int, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(lambda: send(number), capsys) == (code, line)


def test_a_hang_up_that_is_ignored_stays_so() -> None:
    """As `nohup` has it: the command goes on."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    done: list[int] = []
    run_command(lambda: [send(signal.SIGHUP), done.append(1)])
    assert done and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize(("error", "code"), [(UserError("x"), 2), (RunFailed("x"), 1), (TrainingStopped("x"), 1)])
def test_a_mistake_is_told_from_a_failure(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise error

    assert outcome(command, capsys) == (code, "megasharp: x\n")


def test_an_error_is_told_though_a_signal_comes_while_it_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[str] = []

    def command() -> None:
        with signals.ClosingStack() as stack:
            stack.callback(closed.append, "first")
            stack.callback(signals.ClosingStack().close)
            stack.callback(send, signal.SIGINT)
            raise UserError("no space left on the disk")

    assert outcome(command, capsys) == (2, "megasharp: no space left on the disk\n")
    assert closed == ["first"]


def test_all_is_closed_though_more_signals_come(capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[str] = []

    def command() -> None:
        with signals.ClosingStack() as stack:
            stack.callback(closed.append, "first")
            stack.callback(send, signal.SIGINT)
            stack.callback(closed.append, "last")
            send(signal.SIGTERM)

    assert outcome(command, capsys) == (143, "megasharp: stopped by SIGTERM\n")
    assert closed == ["last", "first"]


def test_a_signal_while_a_finished_command_closes(capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[str] = []

    def close() -> None:
        send(signal.SIGTERM)
        closed.append("whole")

    def command() -> None:
        with signals.ClosingStack() as stack:
            stack.callback(close)

    assert outcome(command, capsys)[0] == 143
    assert closed == ["whole"]


def test_what_is_held_is_not_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []

    def command() -> None:
        with signals.held():
            with signals.held():
                send(signal.SIGTERM)
            done.append("whole")
        done.append("never")

    assert outcome(command, capsys)[0] == 143
    assert done == ["whole"]


def test_an_exception_that_was_lost_or_turned_into_another(capsys: pytest.CaptureFixture[str]) -> None:
    def lost() -> None:
        with suppress(BaseException):
            send(signal.SIGTERM)

    def turned() -> None:
        try:
            send(signal.SIGTERM)
        except BaseException:
            raise UserError("no engine is left") from None

    assert outcome(lost, capsys) == (143, "megasharp: stopped by SIGTERM\n")
    signals._State.arrived = None
    assert outcome(turned, capsys) == (143, "megasharp: stopped by SIGTERM\n")


def test_advice_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        try:
            send(signal.SIGTERM)
        except signals.Stopped as stopped:
            raise signals.Stopped(stopped.number, "continue with --resume") from None

    assert outcome(command, capsys)[1] == "megasharp: stopped by SIGTERM; continue with --resume\n"


def test_handlers_are_put_back_where_nothing_came() -> None:
    before = [signal.getsignal(number) for number in signals.NUMBERS]
    with signals.handled():
        assert [signal.getsignal(number) for number in signals.NUMBERS] != before
    assert [signal.getsignal(number) for number in signals.NUMBERS] == before


def test_children_never_get_an_interrupt() -> None:
    """Not even before they run a line of their own."""
    with signals.kept_from_children():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5); print('whole')"], stdout=-1)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=HANG_S)[0] == b"whole\n"


def test_a_save_is_asked_for_where_nothing_is_lost() -> None:
    reached: list[str] = []
    with signals.save_heard():
        send(signal.SIGUSR1)
        reached.append("elsewhere it waits")
        with pytest.raises(signals.SaveAsked), signals.interruptible():
            reached.append("never")
    assert reached == ["elsewhere it waits"]
    send(signal.SIGUSR1)  # Late ones change nothing.


def test_a_save_that_is_asked_for_when_all_is_done_ends_nothing() -> None:
    """Threads that began inside do not hold it back as the main thread does."""
    code = (
        "import os, signal, threading, time\nfrom megasharp.common import signals\n"
        "with signals.save_kept_from_children():\n"
        "    with signals.save_heard():\n"
        "        threading.Thread(target=time.sleep, args=(1,)).start()\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sampling_ends_at_once_when_a_save_is_asked_for() -> None:
    reached: list[str] = []
    with signals.save_heard(), pytest.raises(signals.SaveAsked), signals.interruptible():
        with signals.held():
            send(signal.SIGUSR1)
            reached.append("what is held is finished")
        reached.append("never")
    assert reached == ["what is held is finished"]


def test_sigterm_asks_the_driver_of_a_ray_job_for_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sends it to all processes below the driver's, so ranks have to be Ray's."""
    monkeypatch.delenv(signals._RAY_JOB, raising=False)
    assert signals.save_numbers(ray=True) == (signal.SIGUSR1,)
    monkeypatch.setenv(signals._RAY_JOB, "{}")
    assert signals.save_numbers(ray=False) == (signal.SIGUSR1,)

    def command() -> None:
        with signals.save_heard(signals.save_numbers(ray=True)):
            # Twice: from Ray, and from the parent of `--retries`.
            send(signal.SIGTERM)
            send(signal.SIGTERM)
            with pytest.raises(signals.SaveAsked):
                signals.check_save()
            assert signals.save_asked() == signal.SIGTERM
        send(signal.SIGTERM)  # Saved: what is left is closing.

    run_command(command)
    assert signals.arrived() is None


def test_a_run_that_saved_is_to_be_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise signals.TimeIsUp("saved after step 3")

    assert outcome(command, capsys) == (75, "megasharp: saved after step 3\n")


def test_train_hears_it_while_it_reads_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        send(signals.SAVE)
        raise UserError("read")

    monkeypatch.setattr("megasharp.common.output.outlive", lambda: None)
    monkeypatch.setattr("megasharp.trainer.early_ranks.expect_ranks", lambda *_: None)
    monkeypatch.setattr("megasharp.config.run_config.load_run", read)
    with pytest.raises(UserError, match="read"):
        train(Path("run.yaml"))
    assert signals.save_asked() == signals.SAVE


def test_children_do_not_hear_it() -> None:
    for started in (signals.kept_from_children, signals.save_kept_from_children):
        with started():
            child = subprocess.Popen(["sleep", "60"])
        child.send_signal(signal.SIGUSR1)
        wait_until(partial(is_pending, child.pid, signal.SIGUSR1))
        assert child.poll() is None
        child.kill()
        child.wait()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == set()


def fail_from_a_thread(error: BaseException) -> threading.Thread:
    def both() -> None:
        signals.fail(error)
        signals.interrupt()

    thread = threading.Thread(target=both)
    thread.start()
    return thread


def test_what_another_thread_found_interrupts_the_main_thread() -> None:
    with pytest.raises(StageTimeout, match="too long"), signals.failures_heard():
        fail_from_a_thread(StageTimeout("too long"))
        time.sleep(3600)


def test_what_another_thread_found_waits_for_what_is_held() -> None:
    done = []
    with pytest.raises(StageTimeout, match="too long"), signals.failures_heard(), signals.held():
        fail_from_a_thread(StageTimeout("too long")).join()
        time.sleep(0.1)
        done.append("closed")
    assert done == ["closed"]


def test_after_a_signal_another_thread_interrupts_nothing() -> None:
    with pytest.raises(signals.Stopped), signals.handled(), signals.failures_heard():
        try:
            send(signal.SIGTERM)
        finally:
            fail_from_a_thread(StageTimeout("too long")).join()
            time.sleep(0.1)
