"""`megasharp config`: the keys of a run file, printed from the schema; and other trainers' files as run files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def config_keys(
    key: Annotated[str, typer.Argument(help="A key, as policy.tp; without one, all with their defaults.")] = "",
    json_schema: Annotated[bool, typer.Option(help="Print a JSON schema of run files, for editors.")] = False,
    from_verl: Annotated[Path | None, typer.Option(help="Translate verl's YAML, or a script's overrides.")] = None,
    from_trl: Annotated[Path | None, typer.Option(help="Translate TRL's YAML or JSON, flags, GRPOConfig(...).")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of training: makes steps of epochs.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="With --from-trl: processes, which its file does not have.")] = 1,
) -> None:
    """Print the keys of a run file with their defaults, or what one key does; or another trainer's file as ours."""
    if from_verl is not None:
        from megasharp.config.other_trainers.from_verl import translated as of_verl

        typer.echo(of_verl(from_verl, rows))
    elif from_trl is not None:
        from megasharp.config.other_trainers.from_trl import translated as of_trl

        typer.echo(of_trl(from_trl, rows, gpus))
    else:
        from megasharp.config.key_texts import config_text

        typer.echo(config_text(key, json_schema=json_schema))
