"""One interpreter for a conversation: its names stay, and what ends it says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.sandbox.interpreter import CHARACTERS, Interpreter, InterpreterEnded
from megasharp.tasks.tools.python_tool import Python
from megasharp.tasks.tools.tool import ToolError


def said(pieces: Sequence[str], seconds: float = 20.0) -> list[str]:
    """The answers of the tool to pieces of code; errors in brackets."""

    async def talk() -> list[str]:
        tool, found = Python(seconds=seconds), []
        try:
            for piece in pieces:
                try:
                    found.append(await tool.call({"code": piece}))
                except ToolError as error:
                    found.append(f"[{error}]")
        finally:
            await tool.close()
        return found

    return asyncio.run(talk())


def test_names_stay_and_errors_are_answers() -> None:
    pieces = ["x = 3\nprint('a')\nx * 7", "x", "1 / 0", "x +", "exit(3)", "x = x + 1", "x", f"'b' * {2 * CHARACTERS}"]
    first, second, divided, broken, left, silent, grown, long = said(pieces)
    assert (first, second, silent, grown) == ("a\n21", "3", "(the code printed nothing)", "4")
    assert divided.startswith("Traceback") and divided.endswith(
        "line 1, in <module>\nZeroDivisionError: division by zero"
    )
    assert "SyntaxError" in broken and "ast.py" not in broken and left.endswith("SystemExit: 3")
    assert len(long) == CHARACTERS
    random = "import random\nrandom.random()"
    assert said([random]) == said([random])


def test_code_that_ends_the_interpreter_takes_the_names_with_it() -> None:
    lost = "the next call begins anew, without any variables]"
    ended, anew = said(["x = 1\nimport os\nos._exit(3)", "x"])
    assert ended == f"[the code ended the interpreter; {lost}" and "NameError" in anew
    # What floods the channel is no answer.
    forged, _ = said(["import os\nos.write(3, b'x' * 100)\nos.write(4, b'y' * 100)", "1"])
    assert forged.startswith("[")
    # A process that the code forks neither answers nor takes the next piece.
    assert said(["import os; x = os.fork(); 'A'", "'B'", "x > 0", "'D'"]) == ["'A'", "'B'", "True", "'D'"]


def test_a_call_has_its_seconds_and_its_processes_end_with_it() -> None:
    (late,) = said(["import subprocess, time\nwhile True: time.sleep(1)"], seconds=0.5)
    assert late.startswith("[the code took longer than 0.5 s")

    async def start() -> int:
        interpreter = await asyncio.to_thread(Interpreter, open_sandbox("bubblewrap"))
        assert await interpreter.run("2 + 2", 20.0) == "4\n"
        number = interpreter._process._process.pid
        interpreter.close()
        with pytest.raises(InterpreterEnded):
            await interpreter.run("1", 20.0)
        return number

    assert not Path("/proc", str(asyncio.run(start()))).exists()


def test_it_is_the_sandbox_that_programs_have(tmp_path: Path) -> None:
    file = tmp_path / "file"
    outside, network = said(
        [f"open({str(file)!r}, 'w')", "import socket\nsocket.create_connection(('192.0.2.1', 9), timeout=0.1)"]
    )
    assert "No such file" in outside and not file.exists()
    assert "Error" in network
