"""`megasharp config`: the keys of a run file, printed from the schema."""

from __future__ import annotations

from typing import Annotated

import typer


def config_keys(
    key: Annotated[str, typer.Argument(help="A key, as policy.tp; without one, all with their defaults.")] = "",
    json_schema: Annotated[bool, typer.Option(help="Print a JSON schema of run files, for editors.")] = False,
) -> None:
    """Print the keys of a run file with their defaults, or what one key does."""
    from megasharp.config.key_texts import config_text

    typer.echo(config_text(key, json_schema=json_schema))
