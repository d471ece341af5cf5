"""A run whose output nobody takes trains to its end: `megasharp train ... | head -1`, and worse."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from quickstart import REPOSITORY, Command
from waiting import HANG_S

from megasharp.checkpoint.attempts import read_attempts
from megasharp.cli.main import main


def finished(command: Command, name: str, steps: int) -> str:
    """The console's log of a run that has all its steps and its last checkpoint."""
    run = command.runs / name
    assert [row["step"] for row in command.rows(name)] == list(range(1, steps + 1))
    assert (run / "checkpoints" / "latest").read_text() == f"step_{steps:06d}\n"
    assert [attempt and attempt.exit_code for attempt in read_attempts(run / "logs").values()] == [0]
    return (run / "logs" / "attempt_1" / "console.log").read_text()


@pytest.mark.long("runs")
def test_a_reader_that_goes_after_a_line_does_not_end_the_run(command: Command, tmp_path: Path) -> None:
    """As `head -1` does; standard error goes to a full disk meanwhile."""
    pipe, lines = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)

    def head() -> None:
        with pipe.open() as stream:
            lines.append(stream.readline())

    reader = threading.Thread(target=head)
    reader.start()
    arguments = command.train("steps=2", "name=a")
    assert command._nursery.run(arguments, REPOSITORY, pipe, Path("/dev/full"), HANG_S) == 0
    reader.join()
    log = finished(command, "a", 2)
    assert lines[0].startswith("model ") and "step 2/2" in log and "engine gap, nats" in log
    assert log.count("standard output cannot be written: Broken pipe") == 1


def test_a_broken_pipe_inside_the_run_is_told_from_a_reader_that_is_gone(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typer ends a command whose reader is gone without a word."""

    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("megasharp.trainer.run.train", broken)
    monkeypatch.setattr("megasharp.trainer.resolve.devices.leave_gpus_alone", lambda _: None)
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", ["megasharp", *command.train("name=a", "steps=1")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    line = "megasharp: a process that the run had started is gone: [Errno 32] Broken pipe\n"
    assert capsys.readouterr().err == line


@pytest.mark.long("runs")
@pytest.mark.parametrize(
    ("redirect", "problem", "layout"),
    [
        ("| head -1", "Broken pipe", "policy.tp=2"),
        ("2>&1 | head -1", "Broken pipe", "policy.dp=1"),
        (">&- 2>&- <&-", "it was closed", "policy.tp=2"),
        ("2>&-", "", "policy.dp=1"),
        ("--retries 1 2>&1 | true", "Broken pipe", "policy.tp=2"),
    ],
)
def test_redirections_of_a_shell(command: Command, redirect: str, problem: str, layout: str) -> None:
    """With ranks in processes of their own too, and under a parent that starts runs again."""
    arguments = [sys.executable, "-m", "megasharp.cli", *command.train("steps=3", "name=a", layout)]
    script = f'"$@" {redirect}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    log = finished(command, "a", 3)
    assert problem in log and bool(problem) == bool(log)


@pytest.mark.long("runs")
def test_a_reader_that_never_reads_does_not_hold_the_run_up(command: Command) -> None:
    """Both streams are a pipe of one page, which the first lines fill."""
    process = command.start(*command.train("steps=30", "name=a"))
    assert process.stdout is not None and process.stderr is not None
    for stream in (process.stdout, process.stderr):
        fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, 4096)
    assert process.wait(HANG_S) == 0
    assert "nobody has read it for 2 s" in finished(command, "a", 30)
    process.communicate()
