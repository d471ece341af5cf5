"""`megasharp report`: the page of runs as a file, or served while they train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from megasharp.cli.options import RunsFolder
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import Say, collect_as_usual, status

FILE = "report.html"
PORT = 8042


def report(
    names: Annotated[
        list[str] | None, typer.Argument(help="Runs, by name or folder; none for a page of --evals alone.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write. Without it: report.html in the run's folder, or beside the first --evals."
        ),
    ] = None,
    evals: Annotated[
        list[Path] | None, typer.Option(metavar="JSON", help="Result that megasharp eval wrote; repeatable.")
    ] = None,
    serve: Annotated[
        bool,
        typer.Option(
            help="Serve the page on 127.0.0.1 instead, at a URL with a token; it follows the runs.", show_default=False
        ),
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="With --serve: port; 0 takes any free one. Without it: 8042.")
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Show runs and evaluations in one HTML file that works offline: curves, pass@k, candidates, responses, time."""
    names, evals = names or [], evals or []
    if not names and not evals:
        raise UserError("nothing to show: name a run, or a result of megasharp eval by --evals")
    if port is not None and not serve:
        raise UserError("--port is only for --serve; add --serve, or leave --port out")
    if out is not None and serve:
        raise UserError("--serve writes no file, so --out has no meaning; leave one of them out")
    status(f"loading PyTorch, then reading {', '.join([*names, *map(str, evals)])}")
    from megasharp.reporting.history import find_run

    collect_as_usual()
    folders = [find_run(name, runs) for name in names]
    if serve:
        serve_report(folders, PORT if port is None else port, typer.echo, evals)
    else:
        typer.echo(f"report: {write_report(folders, out, evals)}")


def write_report(folders: Sequence[Path], out: Path | None, evals: Sequence[Path] = ()) -> Path:
    """Write the page of the runs in `folders`, and of `evals`; return its path.

    That is `out`, or in the run's folder, of several runs beside the first's, without any beside the first result.

    Raises UserError for damaged files, or a page that cannot be written.
    """
    from megasharp.common.files import write_like, write_text
    from megasharp.reporting.page.serve import as_html, read_page

    first, *more = folders or evals
    # "." and ".." do not name what they are in.
    beside = (first if first.name not in ("", "..") else first.resolve()).parent
    path = out or (first if folders and not more else beside) / FILE
    if path.is_dir():
        raise UserError(f"--out {path}: this is a folder; give the name of a file, such as {path / FILE}")
    page = read_page(folders, live=False, evals=evals)
    _say_unread(page.unread)
    # It holds what they hold, wherever it is written.
    write_like(*folders, *evals)
    write_text(path, as_html(page))
    return path


def _say_unread(lines: Sequence[str]) -> None:
    for line in lines:
        typer.echo(f"megasharp: left out of the report: {line}", err=True)


def serve_report(folders: Sequence[Path], port: int, say: Say, evals: Sequence[Path] = ()) -> None:
    """Serve the page until Ctrl-C. Raises UserError for a damaged run, a weak token, or a port that is taken."""
    from megasharp.reporting.page.serve import HOST, LivePage, open_server, read_page, token_of_server

    token = token_of_server()
    page = LivePage(folders, lambda: read_page(folders, live=True, evals=evals), evals)
    # A damaged run is refused here, before a browser asks.
    _say_unread(page.newest()[1].unread)
    with open_server(page, port, token) as server:
        say(f"http://{HOST}:{server.server_address[1]}/?token={token}  (this machine only; Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.2)
