"""A command whose output nobody takes goes on, ends as it would have, and finds what was lost in its log."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import HANG_S, SOON_S, wait_until

# 20 lines to each stream, 2 of them before there is a log, and what a library's C code and a child write.
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from megasharp.common import output
output.fill_closed()
output.outlive()
output._PATIENCE_S = float(sys.argv[2])
for number in range(20):
    print(f"out {number}" + "." * 400)
    sys.stderr.write(f"error {number}\\n")
    if number == 1:
        output.log_to(Path(sys.argv[1]))
os.write(1, b"library\\n")
subprocess.run(["echo", "child"], check=True)
sys.stdout.write("no end of line")
"""


def start(folder: Path, out: int | None, error: int | None, patience: float = 0.05) -> subprocess.Popen[bytes]:
    """Start the program with these descriptors; None: the stream is closed."""
    closing = " ".join(f"{number}>&-" for number, stream in ((1, out), (2, error)) if stream is None)
    command = ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", PROGRAM, str(folder), str(patience)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=error)


def nobody() -> int:
    """A pipe without a reader."""
    read, write = os.pipe()
    os.close(read)
    return write


def never_reads() -> int:
    """A pipe that is full, and whose reader stays and does not read."""
    _, write = os.pipe()
    os.set_blocking(write, False)
    for piece in (4096, 1):
        while True:
            try:
                os.write(write, b"\n" * piece)
            except BlockingIOError:
                break
    os.set_blocking(write, True)
    return write


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def hung_up() -> int:
    """A terminal whose other end is gone, as after a lost connection."""
    master, slave = pty.openpty()
    os.close(master)
    return slave


def held() -> int:
    """A terminal in which Ctrl-S was pressed."""
    _, slave = pty.openpty()
    termios.tcflow(slave, termios.TCOOFF)
    return slave


def closed() -> None:
    return None


LOST: dict[Callable[[], int | None], str] = {
    nobody: "Broken pipe",
    never_reads: "nobody has read it",
    full: "No space left on device",
    hung_up: "Input/output error",
    held: "nobody has read it",
    closed: "it was closed when the command started",
}


@pytest.mark.parametrize("make", LOST, ids=lambda make: make.__name__)
def test_whatever_happens_to_both_streams_the_command_goes_on_and_its_log_has_every_line(
    make: Callable[[], int | None], tmp_path: Path
) -> None:
    process = start(tmp_path, make(), make())
    assert process.wait(HANG_S) == 0
    lines = (tmp_path / "console.log").read_text().splitlines()
    for stream in ("output", "error"):
        note = f"megasharp: note: standard {stream} cannot be written: {LOST[make]}"
        assert sum(line.startswith(note) and line.endswith("follows") for line in lines) == 1
    assert [line.rstrip(".") for line in lines if line.startswith("out ")] == [f"out {n}" for n in range(20)]
    assert [line for line in lines if line.startswith("error ")] == [f"error {n}" for n in range(20)]
    assert "library" in lines and "child" in lines and lines[-1] == "no end of line"


def test_the_other_stream_says_where_the_lines_are(tmp_path: Path) -> None:
    read, write = os.pipe()
    process = start(tmp_path, nobody(), write)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    assert process.wait(HANG_S) == 0
    assert text.splitlines()[0] == (
        "megasharp: note: standard output cannot be written: Broken pipe; the command goes on, and a run keeps its "
        "lines in logs/attempt_K/console.log"
    )
    assert text.count("note") == 1 and "error 19" in text


def test_a_reader_that_takes_its_time_misses_nothing(tmp_path: Path) -> None:
    """It has what Python wrote; what passes Python by is in the log."""
    read, write = os.pipe()
    process = start(tmp_path, write, write, patience=HANG_S)
    os.close(write)
    time.sleep(0.2)
    with os.fdopen(read) as stream:
        text = stream.read()
    assert process.wait(HANG_S) == 0
    assert text.count("out ") == text.count("error ") == 20 and text.endswith("no end of line")
    assert (tmp_path / "console.log").read_text() == "library\nchild\n"


def test_what_comes_after_a_pause_of_the_reader_is_shown_again(tmp_path: Path) -> None:
    """Lines written meanwhile do not wait again, each its patience."""
    master, slave = pty.openpty()
    termios.tcflow(slave, termios.TCOOFF)
    pause = "while not Path(sys.argv[1], 'go').exists(): pass\nprint('later')\n"
    command = [sys.executable, "-c", PROGRAM.replace("os.write(1", f"{pause}os.write(1"), str(tmp_path), "0.05"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave)
    log = tmp_path / "console.log"
    wait_until(lambda: log.exists() and "error 19" in log.read_text())
    termios.tcflow(slave, termios.TCOON)
    (tmp_path / "go").touch()
    os.close(slave)
    seen = b""
    while b"no end of line" not in seen:
        seen += os.read(master, 4096)
    assert process.wait(HANG_S) == 0
    assert b"later" in seen and b"error 3" not in seen and "later" not in log.read_text()


@pytest.mark.parametrize(("stream", "problem"), [(full, "No space left"), (closed, None), (nobody, "")])
def test_a_command_that_only_prints_ends_in_one_line_or_none(
    stream: Callable[[], int | None], problem: str | None, tmp_path: Path
) -> None:
    closing = ">&-" if stream is closed else ""
    out = stream()
    command = f'exec "{sys.executable}" -m megasharp.cli --version {closing}'
    done = subprocess.run(["sh", "-c", command], stdout=out, stderr=subprocess.PIPE, check=False, timeout=SOON_S)
    line = f"megasharp: the output cannot be written: {problem} on device\n" if problem else ""
    assert (done.returncode, done.stderr.decode()) == (0 if problem is None else 1, line)
