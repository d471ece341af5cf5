"""`megasharp methods`: every method with its paper, what it changes, its defaults, and how sure its formula is."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megasharp.common.errors import UserError, nearest
from megasharp.common.exit_codes import status

if TYPE_CHECKING:
    from rich.console import Console

    from megasharp.algos.base import Method


def methods(
    name: Annotated[str, typer.Argument(help="Name of a method. Without one, all are listed.")] = "",
    markdown: Annotated[bool, typer.Option(help="Print the table of docs/reference/methods.md.")] = False,
) -> None:
    """List the methods that a recipe may name, or show one of them."""
    status("loading PyTorch, then the methods")
    from megasharp.metrics.console import SafeConsole

    if markdown:
        typer.echo(markdown_table(), nl=False)
    elif name:
        typer.echo(describe_method(name))
    else:
        print_methods(SafeConsole())


def print_methods(console: Console) -> None:
    """Print one row per method, readable in 80 columns."""
    from rich.markup import escape
    from rich.table import Table

    from megasharp.algos import METHODS

    grid = Table(show_lines=True)
    for column in ("method, paper", "what it does; hooks it fills, + what it brings; status", "defaults"):
        grid.add_column(column, overflow="fold", no_wrap=column == "method, paper")
    for name, method in METHODS.items():
        changes = escape(", ".join(_parts(method)))
        middle = f"{escape(_summary(method))}\n[bold]{changes}[/]\n[dim]{escape(method.status)}[/]"
        grid.add_row(f"[bold]{name}[/]\n{method.paper or 'no paper'}", middle, escape("\n".join(_defaults(method))))
    console.print(grid)
    console.print("megasharp methods NAME shows a method's formula; configs/algo/NAME.yaml is a preset to include.")


def describe_method(name: str) -> str:
    """Return a method's own page: its module's docstring, its parameters and their meaning.

    Raises UserError for an unknown name.
    """
    from megasharp.algos import METHODS
    from megasharp.algos.base import MethodParams

    if name not in METHODS:
        raise UserError(f"methods: no method is called {name!r}; {nearest(name, METHODS)}")
    method = METHODS[name]
    page = inspect.getdoc(sys.modules[method.__module__]) or ""
    meaning = inspect.getdoc(method.Params) if method.Params is not MethodParams else None
    facts = (
        f"paper       {method.paper or 'none'}; {method.status}",
        f"hooks       {', '.join(_parts(method))}",
        f"parameters  {', '.join(_defaults(method)) or 'none'}",
        *([f"            {meaning}"] if meaning else []),
    )
    return "\n".join((page, "", *facts))


def markdown_table() -> str:
    """Return the table of docs/reference/methods.md."""
    from megasharp.algos import METHODS

    rows = ["| name in `recipe.methods` | what | changes | paper | status |", "|---|---|---|---|---|"]
    for name, method in METHODS.items():
        changes = ", ".join(f"`{part}`" for part in _parts(method))
        rows.append(f"| `{name}` | {_summary(method)} | {changes} | {method.paper or 'none'} | {method.status} |")
    return "\n".join(rows) + "\n"


def _summary(method: type[Method[Any]]) -> str:
    return (inspect.getdoc(method) or "").split("\n")[0].rstrip(".")


def _parts(method: type[Method[Any]]) -> list[str]:
    """Name the hooks that a method fills, and the methods that it brings."""
    from megasharp.algos.base import overridden_hooks

    sampler = ["sampling"] if method(method.Params()).needs().memory else []
    return [*overridden_hooks(method), *sampler, *(f"+ {name}" for name in method.brings)]


def _defaults(method: type[Method[Any]]) -> list[str]:
    """`key: value` of its own table, and `name.key: value` of what it sets in the tables of what it brings."""
    own = [f"{key}: {value}" for key, value in method.Params().model_dump(mode="json").items()]
    brought = [
        f"{name}.{key}: {getattr(params, key)}"
        for name, params in method.brings.items()
        for key in sorted(params.model_fields_set)
    ]
    return own + brought
