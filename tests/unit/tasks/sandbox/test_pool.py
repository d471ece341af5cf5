"""The pool: verdicts in order, whatever a verifier does to its process, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path

import misbehaving
import pytest
from cases import each_case
from verdict_limits import limit_only
from waiting import HANG_S, SOON_S, wait_until

from megasharp.common.errors import RunFailed, UserError
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.judge import Item
from megasharp.tasks.sandbox.pool import PoolCounts, VerifierPool

LIMIT_S = 2.0
# What hangs, and meets the pool's limit; a verdict that must come has a limit that only a hang reaches.
LIMITED = ("hang", "begin", "stop", "sleep 3600", "child", "limited")


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_only(monkeypatch, lambda item: item.text.startswith(LIMITED))


@pytest.fixture(scope="module")
def shared() -> Iterator[VerifierPool]:
    with_two = pool(memory_mb=512)
    yield with_two
    with_two.close()


def pool(workers: int = 2, timeout_s: float = LIMIT_S, **changes: int) -> VerifierPool:
    return VerifierPool(misbehaving.make, {"obey"}, workers, timeout_s, **changes)


def judge(of: VerifierPool, *texts: str) -> list[Verdict]:
    return of.verdicts([Item("obey", text, TaskAnswer()) for text in texts])


def found(of: VerifierPool, text: str) -> str:
    (verdict,) = judge(of, text)
    assert verdict.outcome is Outcome.CORRECT, verdict
    assert verdict.canonical_answer is not None
    return verdict.canonical_answer


def change(of: VerifierPool, before: PoolCounts) -> tuple[int, int, int]:
    now = of.counts
    return now.killed - before.killed, now.died - before.died, now.retried - before.retried


def runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_verdicts_come_in_the_order_of_the_items(shared: VerifierPool) -> None:
    texts = ["sleep 0.5" if number == 0 else f"echo {'x' * number}" for number in range(40)]
    verdicts = judge(shared, *texts)
    assert [v.canonical_answer for v in verdicts] == ["None", *map(str, range(1, 40))]


def test_an_exception_is_an_error_on_one_line(shared: VerifierPool) -> None:
    before = shared.counts
    assert judge(shared, "raise") == [Verdict(Outcome.ERROR, 0.0, None, "ValueError: two lines")]
    assert change(shared, before) == (0, 0, 0)


def test_ten_megabytes() -> None:
    text = "\ud800" + "é" * 5_000_000
    patient = pool(workers=1, memory_mb=512)
    try:
        assert found(patient, f"echo {text}") == str(len(text))
    finally:
        patient.close()


@each_case("word", ["hang", "stop", "sleep 3600"])
def test_what_takes_too_long_is_killed_and_costs_the_others_nothing(shared: VerifierPool, word: str) -> None:
    before, began = shared.counts, time.monotonic()
    verdicts = judge(shared, word, *["echo x"] * 20)
    assert time.monotonic() - began < LIMIT_S + SOON_S
    assert verdicts[0] == Verdict(Outcome.TIMEOUT, 0.0, None, "no verdict in 2 s")
    assert [v.canonical_answer for v in verdicts[1:]] == ["1"] * 20
    assert change(shared, before) == (1, 0, 0)


def test_a_worker_that_stands_still_does_not_hold_up_who_sends_to_it(shared: VerifierPool) -> None:
    """Its socket takes no more than some hundred kilobytes of 10 MB."""
    for process in {int(found(shared, "pid")) for _ in range(10)}:
        os.kill(process, signal.SIGSTOP)
    began = time.monotonic()
    (verdict,) = judge(shared, "limited " + "x" * 10_000_000)
    assert verdict.outcome is Outcome.TIMEOUT
    assert time.monotonic() - began < LIMIT_S + SOON_S
    judge(shared, *["limited x"] * 4)


def test_all_workers_are_there_again_after_all_were_killed(shared: VerifierPool, tmp_path: Path) -> None:
    judge(shared, "hang", "hang")
    assert [v.canonical_answer for v in judge(shared, *[f"meet {tmp_path}"] * 2)] == ["2", "2"]


def test_a_childs_child_ends_too(shared: VerifierPool, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    (verdict,) = judge(shared, f"child {file}")
    assert verdict.outcome is Outcome.TIMEOUT
    assert file.exists(), "the child had no time to start"
    wait_until(lambda: not runs(int(file.read_text())))


@each_case(
    ("word", "how"),
    [
        ("die", "killed by SIGSEGV"),
        ("kill", "killed by SIGKILL"),
        ("eat 1024", "out of its 512 MB of memory"),
        ("eat 102400", "out of its 512 MB of memory"),
    ],
)
def test_who_dies_twice_is_infra(shared: VerifierPool, word: str, how: str) -> None:
    before = shared.counts
    verdicts = judge(shared, word, "echo x", "echo x")
    assert verdicts[0] == Verdict(Outcome.INFRA, 0.0, None, f"its worker process died 2 times: {how}")
    assert [v.canonical_answer for v in verdicts[1:]] == ["1", "1"]
    assert change(shared, before) == (0, 2, 1)


def test_who_dies_once_is_judged_again(shared: VerifierPool, tmp_path: Path) -> None:
    before = shared.counts
    assert found(shared, f"die_once {tmp_path / 'died'}") == "second time"
    assert change(shared, before) == (0, 1, 1)


def test_several_threads_at_once(shared: VerifierPool) -> None:
    answers: dict[int, list[str | None]] = {}

    def ask(number: int) -> None:
        verdicts = judge(shared, *[f"echo {'x' * number}"] * 10)
        answers[number] = [v.canonical_answer for v in verdicts]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [str(number)] * 10 for number in range(6)}


def test_workers_come_from_a_process_of_one_thread(shared: VerifierPool) -> None:
    assert found(shared, "threads") == "1"


def test_workers_never_hear_who_wants_a_save_or_an_interrupt(shared: VerifierPool) -> None:
    assert found(shared, "blocked") == str([int(signal.SIGINT), int(signal.SIGUSR1)])


def test_a_zygote_that_was_killed_is_replaced() -> None:
    of = pool()
    try:
        os.kill(int(found(of, "zygote")), signal.SIGKILL)
        assert [v.canonical_answer for v in judge(of, *["echo x"] * 6)] == ["1"] * 6
    finally:
        of.close()


def judge_until_closed(of: VerifierPool, folder: Path) -> list[Verdict]:
    """Two that hang; no verdict where the pool is closed first."""
    with suppress(CancelledError):
        return judge(of, f"begin {folder}", f"begin {folder}")
    return []


def begun(folder: Path, count: int) -> None:
    """Wait until so many hang."""
    wait_until(lambda: len(list(folder.iterdir())) == count)


def test_a_worker_in_c_code_ends_with_the_zygote(tmp_path: Path) -> None:
    """It reads no socket that could tell it."""
    of = pool(workers=1, timeout_s=3600.0)
    try:
        worker, zygote = int(found(of, "pid")), int(found(of, "zygote"))
        waiting = threading.Thread(target=judge_until_closed, args=(of, tmp_path))
        waiting.start()
        begun(tmp_path, 1)
        os.kill(zygote, signal.SIGKILL)
        wait_until(lambda: not runs(worker))
    finally:
        of.close()
        waiting.join(HANG_S)


def test_what_a_verdict_leaves_running_is_ended(shared: VerifierPool, tmp_path: Path) -> None:
    """Its parent has ended, and the worker lives on."""
    file = tmp_path / "pid"
    found(shared, f"orphan {file}")
    wait_until(lambda: not runs(int(file.read_text())))


def test_a_closed_pool_leaves_no_process_and_waits_for_none(tmp_path: Path) -> None:
    of = pool(timeout_s=3600.0)
    processes = [int(found(of, "pid")), int(found(of, "zygote"))]
    given_up: list[Verdict] = []
    waiting = threading.Thread(target=lambda: given_up.extend(judge_until_closed(of, tmp_path)))
    waiting.start()
    begun(tmp_path, 2)
    began = time.monotonic()
    of.close()
    waiting.join(SOON_S)
    assert not given_up and not waiting.is_alive() and time.monotonic() - began < SOON_S
    wait_until(lambda: not any(map(runs, processes)))


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import misbehaving
from megasharp.tasks.judge import Item
from megasharp.tasks.sandbox.pool import VerifierPool
from megasharp.common.records import TaskAnswer
pool = VerifierPool(misbehaving.make, {"obey"}, 2, 3600.0)
for word in ("pid", "zygote"):
    print(pool.verdicts([Item("obey", word, TaskAnswer())])[0].canonical_answer, flush=True)
pool.verdicts([Item("obey", f"begin {sys.argv[2]}", TaskAnswer())] * 2)
"""


def test_workers_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(tmp_path)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    processes = [int(driver.stdout.readline()) for _ in range(2)]
    begun(tmp_path, 2)
    assert all(map(runs, processes))
    driver.kill()
    driver.wait()
    wait_until(lambda: not any(map(runs, processes)))


def test_verifiers_that_cannot_be_made() -> None:
    with pytest.raises(UserError, match=r"reward.workers: .* RuntimeError: no such library"):
        VerifierPool(misbehaving.refuse, {"obey"}, 1, LIMIT_S)


def test_a_process_that_something_kills_while_it_starts_may_start_the_next_time(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=rf"workers come from ended .*killed by SIGKILL.* log is {tmp_path}/log"):
        VerifierPool(misbehaving.killed, {"obey"}, 1, LIMIT_S, log=tmp_path / "log")
    with pytest.raises(UserError, match=r"ended .*exit code 7") as refused:
        VerifierPool(misbehaving.ends, {"obey"}, 1, LIMIT_S)
    assert refused.value.exit_code == 2
