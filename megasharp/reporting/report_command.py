"""`megasharp report`: the page of runs as a file, or served while they train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.common.files import write_text
from megasharp.evals.result_files import load_result
from megasharp.reporting.history import read_run
from megasharp.reporting.page.collect import collect
from megasharp.reporting.page.records import Page
from megasharp.reporting.page.serve import HOST, LivePage, as_html, open_server
from megasharp.reporting.runs_command import find_run, told_apart

FILE = "report.html"
PORT = 8042


def read_page(folders: Sequence[Path], *, live: bool, evals: Sequence[Path] = ()) -> Page:
    """The page of the runs in `folders`, and of the JSON files `evals` that `megasharp eval` wrote.

    Raises UserError for damaged files, and for a run that is named twice.
    """
    beside = [load_result(path) for path in evals]
    return collect(told_apart([read_run(folder) for folder in folders], "report"), live=live, beside=beside)


def write_report(names: Sequence[str], runs: Path, out: Path | None, evals: Sequence[Path] = ()) -> Path:
    """Write the page of the runs `names`; returns its path: in the run's folder, of several beside the first's.

    Raises UserError for no such run, damaged files, or a page that cannot be written.
    """
    folders = [find_run(name, runs) for name in names]
    path = out or (folders[0] if len(folders) == 1 else folders[0].resolve().parent) / FILE
    if path.is_dir():
        raise UserError(f"--out {path}: this is a folder; give the name of a file, such as {path / FILE}")
    write_text(path, as_html(read_page(folders, live=False, evals=evals)))
    return path


def serve_report(
    names: Sequence[str], runs: Path, port: int, say: Callable[[str], None], evals: Sequence[Path] = ()
) -> None:
    """Serve the page until Ctrl-C. Raises UserError for no such run, or a port that is taken."""
    folders = [find_run(name, runs) for name in names]
    page = LivePage(folders, lambda: read_page(folders, live=True, evals=evals), evals)
    page.newest()
    with open_server(page, port) as server:
        say(f"http://{HOST}:{server.server_address[1]}/  (this machine only; Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.2)
