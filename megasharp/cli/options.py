"""Options and arguments that several commands have, so that each has one text in `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(help="The run's YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value overrides by dotted path.")]
RunsFolder = Annotated[Path, typer.Option(help="The folder that holds run folders.")]
# Of `report`, `probe`: several runs. Each is a folder, or a name below `--runs`.
RunNames = Annotated[list[str], typer.Argument(help="Runs, by folder or name.")]
