"""The command line: the app, its table of commands, and what all of them share.

Each command is a file beside this one: options, help, exit codes, and the body where it is small. A user's mistake is
one line on standard error and exit code 2. Importing this module imports no library but typer, and a command imports
its subject inside its function, so that `--help` and shell completion answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megasharp import __version__
from megasharp.cli.config import config_keys
from megasharp.cli.convert import convert
from megasharp.cli.data import data_app
from megasharp.cli.doctor import doctor
from megasharp.cli.eval import evaluate
from megasharp.cli.examples import epilog
from megasharp.cli.methods import methods
from megasharp.cli.options import LISTED, ListedOptions
from megasharp.cli.plan import plan
from megasharp.cli.probe import probe
from megasharp.cli.quickstart import quickstart
from megasharp.cli.report import report
from megasharp.cli.runs import runs_app
from megasharp.cli.submit import submit
from megasharp.cli.sweep import sweep
from megasharp.cli.toy import toy
from megasharp.cli.train import train
from megasharp.common.exit_codes import collect_seldom, run_command
from megasharp.common.terminal import visible

# By the panels of `--help`, in its order; within a panel commands with commands of their own come last there.
COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Train": {"quickstart": quickstart, "train": train, "sweep": sweep, "submit": submit},
    "Before a run": {"config": config_keys, "methods": methods, "plan": plan, "doctor": doctor, "data": data_app},
    "After a run": {"eval": evaluate, "probe": probe, "report": report, "runs": runs_app, "convert": convert},
    "Studies": {"toy": toy},
}


class _Group(TyperGroup):
    """The app, whose errors about arguments show control characters of theirs instead of printing them."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _visible_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _visible_errors():
            return super().invoke(ctx)


@contextmanager
def _visible_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Of the command line's parser, which typer keeps to itself: it prints them past the guarded streams.
        if hasattr(error, "format_message") and hasattr(error, "message"):
            error.message = visible(_in_our_words(error) or error.message)
        raise


# Mistakes that typer leaves to pydantic, by pydantic's name.
_EXPECTED = {
    "int_parsing": "integer",
    "float_parsing": "number",
    "finite_number": "finite number",
    "greater_than_equal": "number >= {ge:g}",
    "less_than_equal": "number <= {le:g}",
}


def _in_our_words(error: Exception) -> str:
    """Return what an option expected and found; empty where typer's own message says so."""
    mistakes: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    expected = _EXPECTED.get(mistakes[0]["type"]) if mistakes else None
    return f"expected {expected.format(**mistakes[0].get('ctx', {}))}, found {mistakes[0]['input']}" if expected else ""


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    # Otherwise typer would take sequences out of what goes into a pipe or a file, instead of leaving them to be shown.
    context_settings={"color": True},
    pretty_exceptions_enable=False,
    help="Reinforcement learning with verifiable rewards that keeps a model's answers diverse.",
)
for _panel, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            for _info in _command.registered_commands:
                _info.epilog = epilog(f"{_name} {_info.name}")
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            _class = ListedOptions if _name in LISTED else TyperCommand
            app.command(_name, cls=_class, epilog=epilog(_name), rich_help_panel=_panel)(_command)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"megasharp {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Take the options that belong to no command."""


def main() -> None:
    """Entry point of `megasharp`."""
    collect_seldom()
    run_command(app)


if __name__ == "__main__":
    main()
