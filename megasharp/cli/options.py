"""Options and arguments that several commands have, so that each has one text in `--help`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

RunFile = Annotated[Path, typer.Argument(help="The run file, in YAML.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Keys to override, such as policy.tp=2.")]
RunsFolder = Annotated[Path, typer.Option(help="Folder that holds the run folders.")]
# Of `report`, `probe`: several runs. Each is a folder, or a name below `--runs`.
RunNames = Annotated[list[str], typer.Argument(help="Runs, by name or folder.")]

# Options that take all the values up to the next option, by command. Shells expand a pattern to such values.
LISTED = {"eval": ("--compare", "--with")}


class ListedOptions(TyperCommand):
    """A command with `LISTED` options: `--compare A B --with C D` is read as one option for each value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its values; the parser knows options of one value, which may be repeated."""
        return super().parse_args(ctx, [*_repeated(args, LISTED[str(self.name)])])


def _repeated(args: Sequence[str], listed: Sequence[str]) -> Iterator[str]:
    option, waiting, empty = "", "", ""
    for arg in args:
        if arg.startswith("-"):
            empty = empty or waiting
            name, given, _ = arg.partition("=")
            option = name if name in listed else ""
            waiting = "" if given else option
            if not waiting:
                yield arg
        elif option:
            yield from (option, arg)
            waiting = ""
        else:
            yield arg
    # An option without a value is the parser's to refuse, which takes whatever follows for one.
    if empty or waiting:
        yield empty or waiting
