"""Every command's `--help`: its examples can be typed, every option says what it does, and no text is lost in print."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import typer
from cases import each_case
from typer.testing import CliRunner

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
    help_ = COMMANDS[name].help.split("\n")
    texts = [line for line, _ in EXAMPLES[name]] + [param.help for param in COMMANDS[name].params] + help_
    assert [text for text in texts if " ".join(text.split()) not in shown] == []
