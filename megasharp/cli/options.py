"""Options and arguments that several commands have, so that each has one text in `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(help="The run file, in YAML.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Keys to override, such as policy.tp=2.")]
RunsFolder = Annotated[Path, typer.Option(help="Folder that holds the run folders.")]
# Of `report`, `probe`: several runs. Each is a folder, or a name below `--runs`.
RunNames = Annotated[list[str], typer.Argument(help="Runs, by name or folder.")]
