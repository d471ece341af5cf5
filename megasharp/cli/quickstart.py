"""`megasharp quickstart`: the quickstart's run file, models and data in the user's folder, to run and to change."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from megasharp.common.errors import UserError, reason_at
from megasharp.common.exit_codes import Say

QUICKSTART = "examples/quickstart"
_FOLDERS = ("base", "memory", "data")
_RUN = "run.yaml"


def quickstart(
    out: Annotated[Path, typer.Option(help="Folder to write into, new or empty.")] = Path("quickstart"),
) -> None:
    """Write a first run into a folder: a run file, a tiny model and its data. It trains in minutes on a CPU."""
    write_quickstart(out, typer.echo)


def write_quickstart(out: Path, say: Say) -> None:
    """Write run.yaml, base/, memory/ and data/ into the folder `out`, and say the command that trains.

    The run file names the model and the data beside it, so that the folder can be moved before the first run.

    Raises:
        UserError: `out` is not empty, or cannot be written.
    """
    from megasharp.config.core import SHIPPED

    source = SHIPPED / QUICKSTART
    if not (source / _RUN).is_file():
        raise UserError(f"this installation of megasharp has no quickstart in {source}: install it again")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UserError(f"--out {out} is not empty, and nothing is written over: give another folder")
        for folder in _FOLDERS:
            shutil.copytree(source / folder, out / folder)
        text = (source / _RUN).read_text(encoding="utf-8").replace(f"{QUICKSTART}/", "")
        (out / _RUN).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({reason_at(error, out)}): give another folder") from None
    say(f"wrote {out}: the run file {_RUN}, a tiny base model, its memory network and Countdown's problems")
    say(f"next: megasharp train {shlex.quote(str(out / _RUN))}")
