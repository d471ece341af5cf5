"""Ranks as processes: the same results as in this process, deaths named at once, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from policies import CPU, LAYOUTS, by_sequence, packed, ragged_sequences, recipe, save, save_model, settings, weights_of
from test_shares import named_memory
from torch import Tensor
from waiting import HANG_S, SOON_S

from megasharp.common import signals
from megasharp.common.errors import StageTimeout, UserError
from megasharp.common.records import StepStats
from megasharp.common.watchdog import STACKS_FILE, Budget, Watchdog, Watched
from megasharp.learner.learner import POLICY, LearnerSettings, RankLearner
from megasharp.learner.parallel import COLLECTIVE_TIMEOUT
from megasharp.learner.ranks import processes
from megasharp.learner.ranks.all_ranks import OneRank, Ranks, RanksLearner
from megasharp.learner.ranks.processes import ProcessRanks, RankDied
from megasharp.metrics.clock import StageClock

MODEL = "qwen3-tied"
METHOD = recipe(("grpo", "kl"), mini_batches=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("models"), MODEL)


@pytest.fixture(autouse=True)
def one_thread_and_no_orphans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Equal numbers of threads, so that a rank's sums are those of this process bit for bit."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert children() == []


def children() -> list[psutil.Process]:
    """Living children of this process, except those that multiprocessing, torch and tests/e2e keep for other tests."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            # What the second forks is named like it.
            server = "multiprocessing.forkserver" in command and child.ppid() == os.getpid()
            others = ("multiprocessing.resource_tracker", "torch_shm_manager", "tests/e2e/nursery.py")
            kept = server or any(other in command for other in others)
            if not kept and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def values(folder: str, layout: str) -> dict[str, LearnerSettings]:
    return {POLICY: settings(folder, LAYOUTS[layout], METHOD.needs, offload=("gradients",))}


@dataclass(frozen=True)
class Result:
    """Everything the loop gets from a learner in two steps, with a save and a load between them."""

    logp: dict[int, Tensor]
    stats: list[StepStats]
    weights: dict[str, Tensor]


def run(ranks: Ranks, layout: str, checkpoint: Path) -> Result:
    learner = RanksLearner(ranks)
    try:
        batch = packed(ragged_sequences(), LAYOUTS[layout], mini_batches=2)
        annotated = learner.annotate(batch, METHOD.annotation)
        stats = [learner.step(annotated, METHOD)]
        checkpoint.mkdir()
        save(learner, checkpoint)
        learner.offload()
        learner.onload()
        learner.load(checkpoint)
        stats.append(learner.step(annotated, METHOD))
        return Result(by_sequence(annotated, "old_logp_T"), stats, weights_of(learner))
    finally:
        learner.close()


def test_processes_do_what_one_rank_does(folder: str, tmp_path: Path) -> None:
    inside = run(OneRank(values(folder, "tp1"), CPU), "tp1", tmp_path / "inside")
    alone = run(ProcessRanks(values(folder, "tp1"), CPU, tmp_path / "logs1"), "tp1", tmp_path / "alone")
    assert alone.stats == inside.stats
    assert all(torch.equal(alone.weights[name], weight) for name, weight in inside.weights.items())
    split = run(ProcessRanks(values(folder, "dp2"), CPU, tmp_path / "logs2"), "dp2", tmp_path / "split")
    for got, expected in zip(split.stats, inside.stats, strict=True):
        assert got.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert split.logp.keys() == inside.logp.keys() and split.weights.keys() == inside.weights.keys()
    for flat, logp_T in inside.logp.items():
        torch.testing.assert_close(split.logp[flat], logp_T, atol=1e-5, rtol=0)


def place_of(part: RankLearner, offset: int) -> tuple[int, bool]:
    return part.place.pp + offset, part.place.exports


@pytest.mark.long("ranks")
def test_a_function_runs_on_every_rank(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the user happens to be among files that are called as Python's modules are."""
    (tmp_path / "socket.py").write_text("raise SystemExit('a module of the folder where the user is')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    inside = OneRank(values(folder, "tp1"), CPU)
    assert RanksLearner(inside).call(place_of, 5) == [(5, True)]
    inside.close()
    ranks = ProcessRanks(values(folder, "tp2pp2"), CPU, tmp_path / "logs")
    assert RanksLearner(ranks).call(place_of, 5) == [(5, True), (5, False), (6, True), (6, False)]
    assert ranks.call(POLICY, collectives_limits) == [{COLLECTIVE_TIMEOUT}] * 4
    ranks.close()
    assert "PYTHONSAFEPATH" not in os.environ


def collectives_limits(_: RankLearner) -> set[timedelta]:
    """The time limits of all groups of a rank, Megatron's too."""
    backends = [group._get_backend(CPU) for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
    return {backend.options._timeout for backend in backends}


def read_a_cut_file(_: RankLearner) -> None:
    raise EOFError("the file ends early")


def test_an_end_of_file_in_a_call_is_an_error(folder: str, tmp_path: Path) -> None:
    """At the pipe it would mean that the driver is gone."""
    ranks = ProcessRanks(values(folder, "tp1"), CPU, tmp_path / "logs")
    with pytest.raises(RankDied, match=r"^rank 0 failed in read_a_cut_file: .*the file ends early"):
        ranks.call(POLICY, read_a_cut_file)


@pytest.mark.long("ranks")
def test_ranks_that_do_not_end_share_one_time_limit(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SHUTDOWN_S", 1.0)
    limits: list[float] = []
    join = BaseProcess.join

    def noted(process: BaseProcess, timeout: float | None = None) -> None:
        limits.append(timeout or 0.0)
        join(process, timeout)

    ranks = ProcessRanks(values(folder, "tp2pp2"), CPU, tmp_path / "logs")
    for process in ranks._processes:
        os.kill(process.pid or 0, signal.SIGSTOP)
    monkeypatch.setattr(BaseProcess, "join", noted)
    began = time.monotonic()
    ranks.close()
    assert time.monotonic() - began >= 1.0
    # One after the other, four would have 4.
    assert sum(limits) <= 1.0


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_is_named_at_once(folder: str, tmp_path: Path, victim: int) -> None:
    ranks = ProcessRanks(values(folder, "tp2"), CPU, tmp_path / "logs")
    process = next(p for p in ranks._processes if p.name.endswith(f" {victim}"))
    batch = packed(ragged_sequences(), LAYOUTS["tp2"], micro_batch_tokens=16)
    one_step = recipe()
    RanksLearner(ranks).step(batch, one_step)
    killer = threading.Timer(0.5, lambda: os.kill(process.pid or 0, signal.SIGKILL))
    killer.start()
    with pytest.raises(RankDied, match=rf"rank {victim} ended with exit code -9 in step.*rank_{victim}\.log"):
        while True:
            RanksLearner(ranks).step(batch, one_step)
    died = time.monotonic()
    killer.join()
    ranks.close()
    assert time.monotonic() - died < SOON_S
    assert children() == []


@pytest.mark.long("ranks")
def test_a_stopped_rank_is_found_by_the_watchdog(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stacks are nobody's, the others' are in the file; none is left."""
    monkeypatch.setattr(signals._State, "failure", None)
    logs, clock = tmp_path / "logs", StageClock()
    ranks = ProcessRanks(values(folder, "tp2"), CPU, logs)
    batch = packed(ragged_sequences(), LAYOUTS["tp2"], micro_batch_tokens=16)
    RanksLearner(ranks).step(batch, recipe())
    os.kill(ranks._processes[1].pid or 0, signal.SIGSTOP)
    began = time.monotonic()
    budget = Budget(1.0, "guard.stage_timeout_s")
    with (
        pytest.raises((RankDied, StageTimeout)),
        Watchdog(Watched(clock.present, logs, 2), budget, {}),
        clock.stage("update"),
    ):
        RanksLearner(ranks).step(batch, recipe())
    ranks.close()
    assert time.monotonic() - began < 4 * SOON_S
    line = f"{signals.failure()}"
    assert line.startswith("stage update has run for more than 1 s (guard.stage_timeout_s): rank 1 is stopped (state T")
    text = (logs / STACKS_FILE).read_text()
    of_rank_0, of_rank_1 = text.partition("==== rank 0: ")[2].split("==== rank 1: ")
    assert "in _answer_calls" in of_rank_0 and "megasharp/learner/learner.py" in of_rank_0
    assert "state T ====\nIt wrote no stacks." in of_rank_1
    assert "Thread MainThread" in text and "in call" in text
    assert children() == []


def test_a_users_mistake_arrives_as_such(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no-such-folder .* it does not exist"):
        ProcessRanks(values(str(tmp_path / "no-such-folder"), "tp2"), CPU, tmp_path / "logs")
    assert children() == []


def test_any_other_error_names_rank_and_call_and_who_is_stopped(folder: str, tmp_path: Path) -> None:
    """A stopped rank's peers give up in the end, with errors that say nothing of it."""
    ranks = ProcessRanks(values(folder, "dp2"), CPU, tmp_path / "logs")
    os.kill(ranks._processes[1].pid or 0, signal.SIGSTOP)
    stopped = r"rank 1 is stopped \(state T, as by SIGSTOP\)"
    with pytest.raises(RankDied, match=rf"^{stopped}, and rank 0 failed in len: .*has no len"):
        ranks.call(POLICY, len)
    assert "TypeError" in "".join(path.read_text() for path in (tmp_path / "logs").iterdir())


DRIVER = """
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from policies import CPU, LAYOUTS, recipe, settings
from test_shares import seen, shares
from megasharp.learner.learner import RankLearner
from megasharp.learner.ranks.processes import ProcessRanks

if __name__ == "__main__":
    ranks = ProcessRanks({{"policy": settings({folder!r}, LAYOUTS["dp2"], recipe().needs)}}, CPU, Path({logs!r}))
    Path({logs!r}, "saved").mkdir()
    # Saving has threads of its own.
    ranks.call("policy", RankLearner.begin_save, Path({logs!r}, "saved"), False)
    ranks.call("policy", RankLearner.finish_saves)
    ranks.call_shared("policy", seen, shares(2), 1)
    print("saved", flush=True)
    {then}
"""


@pytest.mark.long("ranks")
@pytest.mark.parametrize("end", ["killed", "raises"])
def test_ranks_end_with_their_driver(folder: str, tmp_path: Path, end: str) -> None:
    script = tmp_path / "driver.py"
    then = "time.sleep(3600)" if end == "killed" else "raise RuntimeError('the driver has a bug')"
    script.write_text(DRIVER.format(path=sys.path, folder=folder, logs=str(tmp_path / "logs"), then=then))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "saved\n"
            ranks = psutil.Process(driver.pid).children(recursive=True)
            assert len(ranks) >= 2
            # They were sent their shares, of which no name may stay.
            assert [line for process in (driver, *ranks) for line in named_memory(process.pid)] == []
            if end == "killed":
                driver.kill()
            driver.wait(timeout=HANG_S)
            _, alive = psutil.wait_procs(ranks, timeout=SOON_S)
            assert alive == []
        finally:
            driver.kill()
