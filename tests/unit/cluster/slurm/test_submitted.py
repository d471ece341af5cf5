"""Runs whose jobs wait, or ended before the run began, are listed and shown; squeue is a stand-in here."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import pytest
from cases import each_case
from rich.console import Console

from megasharp.cli.runs import list_runs, show_run
from megasharp.cluster.slurm.submitted import SUBMITTED, record, standings


def submitted(runs: Path, name: str, *jobs: str) -> Path:
    folder = runs / name
    (folder / "logs").mkdir(parents=True)
    for job in jobs:
        record(folder, job, folder / "logs" / f"slurm_{job}.log")
    return folder


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in's answer; its calls are counted beside it."""
    tools, answer = tmp_path / "tools", tmp_path / "answer"
    tools.mkdir()
    program = tools / "squeue"
    program.write_text(f'#!/bin/sh\necho "$@" >>{answer}.calls\ncat {answer}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return answer


def test_the_list_asks_once_and_says_where_each_job_stands(tmp_path: Path, squeue: Path) -> None:
    runs = tmp_path / "runs"
    squeue.write_text("7|PENDING|N/A|Resources\n9_2|RUNNING|2026-11-29T07:20:21|None\n8|PENDING|N/A|Dependency\n")
    submitted(runs, "waits", "7", "8")
    submitted(runs, "of_an_array", "9_2")
    submitted(runs, "cancelled", "5")
    (submitted(runs, "sick_node", "6") / "logs" / "slurm_6.log").write_text("gave up: a node is not well")
    resumed = submitted(runs, "goes_on", "7")
    (resumed / "config.yaml").write_text("name: goes_on\nsteps: 9\n")
    console = Console(width=250)
    with console.capture() as captured:
        list_runs(runs, console)
    rows = {line.split()[0]: line for line in captured.get().splitlines()[1:]}
    assert (
        "queued (job 7, PENDING: Resources)" in rows["waits"] and "starting (job 9_2, RUNNING)" in rows["of_an_array"]
    )
    assert "job 5 left the queue before it began" in rows["cancelled"]
    assert f"job 6 ended before the run began: see {runs}/sick_node/logs/slurm_6.log" in rows["sick_node"]
    assert "queued (job 7" in rows["goes_on"] and "0 of 9" in rows["goes_on"]
    (call,) = Path(f"{squeue}.calls").read_text().splitlines()
    assert "--jobs=" in call and {"5", "6", "7", "8", "9_2"} <= set(call.split("--jobs=")[1].split()[0].split(","))
    with console.capture() as captured:
        show_run("waits", runs, console)
        show_run("goes_on", runs, console)
    assert captured.get().count("queued (job 7, PENDING: Resources)") == 2


@each_case(
    ("started", "began", "word"),
    [
        ("2026-11-29T07:20:21", 0.0, "starting"),
        ("2026-11-29T07:20:21", 60.0, "saving or ending"),
        ("2026-11-29T07:20:21", -60.0, "starting"),
        ("N/A", 1e9, "saving or ending"),
        ("N/A", -1e9, "starting"),
    ],
)
def test_a_job_whose_attempt_has_trained_is_not_starting(
    tmp_path: Path, squeue: Path, started: str, began: float, word: str
) -> None:
    """`began`: seconds after the job's last start; a job that was queued again has attempts from before it."""
    folder = submitted(tmp_path / "runs", "a", "1")
    squeue.write_text(f"1|RUNNING|{started}|None\n")
    start = datetime(2026, 11, 29, 7, 20, 21).timestamp()
    assert standings({folder: start + began if began else 0.0}) == {folder: f"{word} (job 1, RUNNING)"}


def test_a_job_that_began_is_the_attempts_to_tell_and_without_slurm_its_number_is_said(
    tmp_path: Path, squeue: Path
) -> None:
    folder = submitted(tmp_path / "runs", "a", "7")
    squeue.write_text("")
    assert "job 7 left the queue" in standings({folder: 0.0})[folder]
    began = {folder: time.time() + 1}
    assert standings(began) == {}
    log, own = folder / "logs" / "slurm_7.log", "2026-11-29T07:20:21+00:00 job 7, restart 2: "
    log.write_text("x" * 20000 + f"\n{own}gave up: no progress; submit again\nsrun: error\n")
    assert standings(began) == {folder: "job 7 gave up: no progress; submit again"}
    # Somebody has queued it again by hand.
    log.write_text(f"{own}gave up: no progress\n{own}begins at step 20\n")
    assert standings(began) == {}
    log.unlink()
    assert standings({folder: 0.0}, lambda jobs: None) == {folder: "submitted as job 7"}
    with (folder / SUBMITTED).open("a") as file:
        file.write("torn {\n" + json.dumps({"job": "8"}) + "\n")
    assert "job 7 left" in standings({folder: 0.0})[folder]
    (folder / SUBMITTED).unlink()
    assert standings({folder: 0.0}) == {}
