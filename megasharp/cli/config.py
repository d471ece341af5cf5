"""`megasharp config`: the keys of a run file, printed from the schema; and other trainers' files as run files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.common.exit_codes import status

TRANSLATE = "Translate another trainer's configuration"


def config_keys(
    key: Annotated[str, typer.Argument(help="Key, such as policy.tp. Without one, all keys with defaults.")] = "",
    json_schema: Annotated[
        bool, typer.Option(help="Print a JSON schema of run files, for editors.", show_default=False)
    ] = False,
    from_verl: Annotated[
        Path | None,
        typer.Option(help="verl's YAML file, or a script with its overrides.", rich_help_panel=TRANSLATE),
    ] = None,
    from_trl: Annotated[
        Path | None,
        typer.Option(
            help="TRL's YAML or JSON file, flags, or a script with GRPOConfig(...).", rich_help_panel=TRANSLATE
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Number of training rows, from which epochs become steps.", rich_help_panel=TRANSLATE),
    ] = None,
    gpus: Annotated[
        int,
        typer.Option(
            min=1, help="With --from-trl: number of processes, which TRL's file lacks.", rich_help_panel=TRANSLATE
        ),
    ] = 1,
) -> None:
    """Explain the keys of a run file, or translate another trainer's configuration into one."""
    status(f"loading PyTorch, then reading {from_verl or from_trl or 'the keys of a run file'}")
    if from_verl is not None:
        from megasharp.config.other_trainers.from_verl import translated as of_verl

        typer.echo(of_verl(from_verl, rows))
    elif from_trl is not None:
        from megasharp.config.other_trainers.from_trl import translated as of_trl

        typer.echo(of_trl(from_trl, rows, gpus))
    else:
        from megasharp.config.key_texts import config_text

        typer.echo(config_text(key, json_schema=json_schema))
