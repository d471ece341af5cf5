"""What starts a run again and what does not, where that ends, and whose signals are whose. The run is a stand-in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from cases import each_case
from waiting import HANG_S, SOON_S, is_pending

from megasharp.common import signals
from megasharp.common.supervisor import Supervisor

# One attempt: its number is that of the folder it makes, its deed stands in `deeds`.
RUN = """
import json, os, signal, sys, time
from pathlib import Path

root = Path(sys.argv[1])
number = 1 + len(list(root.glob("logs/attempt_*")))
logs = root / f"logs/attempt_{number}"
logs.mkdir(parents=True)
(logs / "arguments").write_text(" ".join(sys.argv[2:]))

def record(**values):
    (logs / "attempt.json").write_text(json.dumps({"pid": os.getpid(), **values}))

def save(step):
    (root / "checkpoints").mkdir(exist_ok=True)
    (root / "checkpoints/latest").write_text(f"step_{step:06d}\\n")

def evaluate(count):
    (root / "evals").mkdir(exist_ok=True)
    (root / f"evals/part_{count}.parquet").touch()

def heard(count):
    with (logs / "heard").open("a") as file:
        file.write(f"{count}\\n")

def on_signals(ends):
    first = []
    def note(number, _):
        heard(number)
        first.append(number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    (logs / "ready").touch()
    while not first or not ends:
        time.sleep(0.01)
    # For what may come a second time.
    time.sleep(0.3)
    sys.exit(75 if first[0] == signal.SIGUSR1 else 128 + first[0])

record()
exec(json.loads((root / "deeds").read_text())[number - 1])
"""
FAILS = "record(reason='rank 1 ended', exit_code=1); sys.exit(1)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
DONE = "sys.exit(0)"


class Stand:
    """A run's folder with what its attempts do."""

    def __init__(self, root: Path, *deeds: str) -> None:
        self.root = root
        root.mkdir()
        (root / "deeds").write_text(json.dumps(deeds))
        self.script = root / "run.py"
        self.script.write_text(RUN)
        self.said: list[str] = []

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-S", str(self.script), str(self.root)]

    def run(self, retries: int) -> int:
        return Supervisor(self.command, self.root, self.said.append, pause_s=0.0).run(retries)

    def attempts(self) -> list[str]:
        """The further arguments of each."""
        count = len(list(self.root.glob("logs/attempt_*")))
        return [(self.root / f"logs/attempt_{n + 1}/arguments").read_text() for n in range(count)]

    def pid(self) -> int:
        """The first attempt's process."""
        return int(json.loads((self.root / "logs/attempt_1/attempt.json").read_text())["pid"])

    def heard(self, attempt: int = 1) -> list[int]:
        return list(map(int, (self.root / f"logs/attempt_{attempt}/heard").read_text().split()))


@each_case(
    ("deed", "words"),
    [
        (FAILS, "rank 1 ended"),
        (KILLED, "the run was ended by SIGKILL"),
        ("signal.raise_signal(signal.SIGSEGV)", "the run was ended by SIGSEGV"),
        ("sys.exit(1)", "the run ended with exit code 1"),
    ],
)
def test_a_failure_is_followed_by_another_start(tmp_path: Path, deed: str, words: str) -> None:
    stand = Stand(tmp_path / "run", f"save(3); {deed}", DONE)
    assert stand.run(3) == 0
    assert stand.attempts() == ["", "--resume"]
    assert stand.said == [f"{words}; starts again at step_000003 (restart 1 of 3)"]


@each_case(
    ("deed", "code"),
    [
        (DONE, 0),
        ("sys.exit(2)", 2),
        ("sys.exit(75)", 75),
        ("sys.exit(129)", 129),
        ("sys.exit(130)", 130),
        ("sys.exit(143)", 143),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("record(reason='5 steps in a row', exit_code=1, gave_up=True); sys.exit(1)", 1),
    ],
)
def test_an_end_that_is_final(tmp_path: Path, deed: str, code: int) -> None:
    stand = Stand(tmp_path / "run", deed, DONE)
    assert stand.run(3) == code
    assert len(stand.attempts()) == 1 and stand.said == []


def test_restarts_are_counted_and_the_last_exit_code_is_the_supervisors(tmp_path: Path) -> None:
    stand = Stand(tmp_path / "run", *(f"save({step}); {KILLED}" for step in range(9)))
    assert stand.run(2) == 137
    assert len(stand.attempts()) == 3
    assert stand.said[-1].endswith("ended by SIGKILL; 2 restarts are all that were allowed, at step_000002")


def test_two_restarts_without_progress_are_the_last(tmp_path: Path) -> None:
    stand = Stand(tmp_path / "run", f"save(3); {FAILS}", f"save(6); {KILLED}", FAILS, FAILS, DONE)
    assert stand.run(9) == 1
    assert len(stand.attempts()) == 4
    assert stand.said[-1] == "rank 1 ended; given up: 2 restarts began at step_000006 and made no progress"


def test_an_evaluation_that_goes_on_is_progress(tmp_path: Path) -> None:
    begun = [f"save(3); {KILLED}", *(f"evaluate({part}); {KILLED}" for part in range(4))]
    stand = Stand(tmp_path / "run", *begun, DONE)
    assert stand.run(9) == 0
    assert len(stand.attempts()) == 6


def test_a_run_that_never_comes_to_a_checkpoint(tmp_path: Path) -> None:
    stand = Stand(tmp_path / "run", FAILS, FAILS, FAILS, DONE)
    assert stand.run(9) == 1
    assert len(stand.attempts()) == 3 and "began at no checkpoint" in stand.said[-1]


def test_options_of_the_first_attempt_hold_until_one_has_opened_the_folder(tmp_path: Path) -> None:
    """Else --start-over, killed while it imports, would be followed by a --resume of the old run."""
    early = f"(logs / 'attempt.json').unlink(); {KILLED}"
    stand = Stand(tmp_path / "run", early, FAILS, FAILS, DONE)
    first = ["--start-over"]
    assert Supervisor(stand.command, stand.root, stand.said.append, first, pause_s=0.0).run(9) == 1
    assert stand.attempts() == ["--start-over", "--start-over", "--resume"]


def test_an_earlier_attempts_record_is_not_this_ones(tmp_path: Path) -> None:
    """The first gave up; the next is killed before it can write one."""
    unrecorded = f"(logs / 'attempt.json').unlink(); {KILLED}"
    stand = Stand(tmp_path / "run", "record(gave_up=True); sys.exit(1)", unrecorded, DONE)
    assert stand.run(3) == 1
    assert stand.run(3) == 0


PARENT = """
import os, signal, sys
from pathlib import Path
from megasharp.common.supervisor import Supervisor
FIRST
say = lambda text: print(text, file=sys.stderr, flush=True)
sys.exit(Supervisor(sys.argv[2:], Path(sys.argv[1]), say, pause_s=PAUSE).run(5))
"""


def parent(stand: Stand, pause: float = 0.0, first: str = "") -> subprocess.Popen[str]:
    """A supervisor in a process of its own, first of its process group as a shell starts one."""
    script = PARENT.replace("PAUSE", str(pause)).replace("FIRST", first)
    command = [sys.executable, "-c", script, str(stand.root), *stand.command]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)


def wait_for(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@each_case(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75)],
    ids=str,
)
@each_case("to_group", [False, True])
def test_a_signal_is_the_runs_and_comes_once(tmp_path: Path, number: int, code: int, to_group: bool) -> None:
    """Also a terminal's or `timeout`'s, which goes to the whole group."""
    stand = Stand(tmp_path / "run", "on_signals(True)", DONE)
    process = parent(stand)
    wait_for((stand.root / "logs/attempt_1/ready").exists)
    # Two that come together may count as one, so that nothing is seen of it below.
    assert os.getpgid(stand.pid()) != process.pid
    (os.killpg if to_group else os.kill)(process.pid, number)
    _, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, said) == (code, "")
    assert stand.heard() == [number] and len(stand.attempts()) == 1


def test_a_save_is_asked_for_once_the_run_can_hear_it(tmp_path: Path) -> None:
    young = "(logs / 'young').touch()\nwhile not (logs / 'asked').exists(): time.sleep(0.01)\non_signals(True)"
    stand = Stand(tmp_path / "run", young)
    process = parent(stand)
    wait_for((stand.root / "logs/attempt_1/young").exists)
    os.kill(process.pid, signal.SIGUSR1)
    wait_for(lambda: is_pending(stand.pid(), signal.SIGUSR1))
    (stand.root / "logs/attempt_1/asked").touch()
    process.communicate(timeout=HANG_S)
    assert process.returncode == 75 and stand.heard() == [signal.SIGUSR1]


def test_a_save_that_was_asked_for_before_the_supervisor_listens(tmp_path: Path) -> None:
    """It waits, where whoever started the supervisor holds it back."""
    stand = Stand(tmp_path / "run", "on_signals(True)")
    with signals.save_kept_from_children():
        process = parent(stand, first="os.kill(os.getpid(), signal.SIGUSR1)")
    wait_for(lambda: list(stand.root.glob("logs/attempt_1/heard")) or process.poll() is not None)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 75 and stand.heard() == [signal.SIGUSR1]


@each_case(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_signal_between_two_attempts_is_the_end(tmp_path: Path, number: int, code: int) -> None:
    stand = Stand(tmp_path / "run", FAILS, DONE)
    process = parent(stand, pause=3600.0)
    assert process.stderr is not None
    process.stderr.readline()
    os.kill(process.pid, number)
    process.communicate(timeout=HANG_S)
    assert process.returncode == code and len(stand.attempts()) == 1


def test_a_run_that_fails_after_it_was_asked_to_save_is_not_started_again(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(1)); signal.pthread_sigmask(signal.SIG_UNBLOCK, {10})"
    stand = Stand(tmp_path / "run", f"{body}; (logs / 'ready').touch(); time.sleep(3600)", DONE)
    process = parent(stand)
    wait_for((stand.root / "logs/attempt_1/ready").exists)
    os.kill(process.pid, signal.SIGUSR1)
    _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 75 and "continue with --resume" in said and len(stand.attempts()) == 1


def test_a_run_that_is_stopped_is_ended_and_started_again(tmp_path: Path) -> None:
    """Its own watchdog is stopped with it."""
    stand = Stand(tmp_path / "run", "save(3); signal.raise_signal(signal.SIGSTOP)", DONE)
    supervisor = Supervisor(stand.command, stand.root, stand.said.append, pause_s=0.0, stopped_limit_s=2.0)
    assert supervisor.run(3) == 0
    why = "the driver is stopped (state T, as by SIGSTOP), for more than 2 s"
    assert stand.said == [f"{why}; starts again at step_000003 (restart 1 of 3)"]


def test_a_run_that_was_stopped_for_a_moment_goes_on(tmp_path: Path) -> None:
    stand = Stand(tmp_path / "run", "os.kill(os.getppid(), 0); signal.raise_signal(signal.SIGSTOP)", DONE)
    supervisor = Supervisor(stand.command, stand.root, stand.said.append, stopped_limit_s=600.0)

    def go_on() -> None:
        wait_for((stand.root / "logs/attempt_1/attempt.json").exists)
        wait_for(lambda: psutil.Process(stand.pid()).status() == psutil.STATUS_STOPPED)
        os.kill(stand.pid(), signal.SIGCONT)

    other = threading.Thread(target=go_on)
    other.start()
    assert supervisor.run(3) == 0 and stand.said == []
    other.join()


def test_a_stopped_run_hears_a_signal(tmp_path: Path) -> None:
    stand = Stand(tmp_path / "run", "on_signals(True)")
    process = parent(stand)
    wait_for((stand.root / "logs/attempt_1/ready").exists)
    os.kill(stand.pid(), signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 143 and stand.heard() == [signal.SIGTERM]


def test_the_run_ends_with_its_supervisor(tmp_path: Path) -> None:
    stand = Stand(tmp_path / "run", "on_signals(False)")
    process = parent(stand)
    wait_for((stand.root / "logs/attempt_1/ready").exists)
    child = psutil.Process(stand.pid())
    process.kill()
    process.communicate()
    assert psutil.wait_procs([child], timeout=SOON_S)[1] == []


def test_it_imports_nothing_that_takes_long(tmp_path: Path) -> None:
    """The child is `false` here."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom megasharp.cli.train import train_again\n"
        "sys.executable = 'false'\nPath('run.yaml').write_text('steps: 1')\n"
        "print(train_again(Path('run.yaml'), [], Path('runs'), [], [], 0))\n"
        "print(*({m.split('.')[0] for m in sys.modules} & {'torch', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1", ""]


def test_a_signal_that_comes_while_another_is_passed_on(tmp_path: Path) -> None:
    supervisor, sent = Supervisor([], tmp_path, print), []

    class Child:
        returncode = None
        interrupted = False

        @property
        def send_signal(self) -> Callable[[signal.Signals], None]:
            if not self.interrupted:
                self.interrupted = True
                supervisor._handle(signal.SIGUSR1, None)
            return sent.append

    supervisor._child = Child()  # type: ignore[assignment]
    supervisor._handle(signal.SIGTERM, None)
    assert sorted(number for number in sent if number != signal.SIGCONT) == [signal.SIGUSR1, signal.SIGTERM]
