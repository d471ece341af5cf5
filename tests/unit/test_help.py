"""First output of every command: `--help`, whose examples can be typed, and a line before a slow import."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from cases import each_case
from typer.testing import CliRunner
from waiting import HANG_S

from megasharp.cli.examples import EXAMPLES
from megasharp.cli.main import app


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command of the app with its name, as `runs show`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


GROUP: Any = typer.main.get_command(app)
COMMANDS = dict(commands(GROUP))


def test_every_command_has_examples() -> None:
    assert EXAMPLES.keys() == COMMANDS.keys()


@each_case("name", COMMANDS)
def test_every_argument_and_option_says_what_it_does(name: str) -> None:
    silent = [param.name for param in COMMANDS[name].params if not param.help]
    assert silent == []


@each_case("name", EXAMPLES)
def test_examples_are_accepted_as_they_are_printed(name: str) -> None:
    for line, _ in EXAMPLES[name]:
        words = shlex.split(line)
        assert " ".join(words).startswith(name)
        COMMANDS[name].make_context(name, words[len(name.split()) :])


@each_case("name", EXAMPLES)
def test_help_prints_all_of_its_text(name: str) -> None:
    """Rich takes words in brackets for markup, and leaves them out."""
    done = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    shown = " ".join(done.output.split())
    shown_help = [param.help for param in COMMANDS[name].params if not getattr(param, "hidden", False)]
    help_ = COMMANDS[name].help.split("\n")
    texts = [line for line, _ in EXAMPLES[name]] + shown_help + help_
    assert [text for text in texts if " ".join(text.split()) not in shown] == []


@each_case(
    ("line", "message"),
    [
        ("train my.yaml --retries -1", "Invalid value for '--retries': expected number >= 0, found -1"),
        ("train my.yaml --retries x", "Invalid value for '--retries': expected integer, found x"),
        ("plan my.yaml --mfu 2", "Invalid value for '--mfu': expected number <= 1, found 2"),
        ("plan my.yaml --disk fast", "Invalid value for '--disk': expected number, found fast"),
        ("trian my.yaml", "No such command 'trian'. Did you mean 'train'?"),
        ("runs lst", "No such command 'lst'. Did you mean 'list'?"),
    ],
)
def test_a_command_line_that_is_wrong_is_told_in_plain_words(line: str, message: str) -> None:
    done = CliRunner().invoke(app, line.split(), env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert done.exit_code == 2
    assert message in done.output


# Runs each command line of its input in a process of its own, up to the first import of a library that takes seconds;
# prints those that have written nothing to their terminal by then, or at their end.
FIRST_WORDS = """
import os, sys
SLOW = {"torch", "transformers", "megatron", "ray", "sglang", "matplotlib", "pandas", "pyarrow", "datasets"}

class Terminal:
    encoding, said = "utf-8", False
    def isatty(self): return True
    def flush(self): pass
    def write(self, text): Terminal.said |= bool(text.strip()); return len(text)

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in SLOW:
            os._exit(0 if Terminal.said else 7)

# Modules that every command imports are imported once, here.
import huggingface_hub, pydantic, rich.console, yaml
from megasharp.cli.main import main
for line in sys.stdin.read().splitlines():
    child = os.fork()
    if not child:
        sys.argv, sys.stdout, sys.stderr = ["megasharp", *line.split()], Terminal(), Terminal()
        sys.meta_path.insert(0, Watch())
        try:
            main()
        except BaseException:
            pass
        os._exit(0 if Terminal.said else 8)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        print(code, line)
"""


def silent(lines: list[str], folder: Path) -> str:
    """The command lines that say nothing before they load a slow library."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_WORDS],
        input="\n".join(lines),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_says_something_before_it_loads_what_takes_seconds(tmp_path: Path) -> None:
    assert silent([lines[-1][0] for lines in EXAMPLES.values()], tmp_path) == ""
