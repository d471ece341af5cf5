"""pyarrow, imported when the first table is read or written: a run that keeps no tables starts without it.

pyarrow takes 150 MB of disk, which a GPU machine rented for an hour may lack.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megasharp.common.errors import UserError
from megasharp.common.records import TurnText


def arrow() -> Any:
    """Import and return `pyarrow`. Raises UserError where it is not installed."""
    return _imported("pyarrow")


def parquet() -> Any:
    """Import and return `pyarrow.parquet`. Raises UserError where pyarrow is not installed."""
    return _imported("pyarrow.parquet")


def write_rows(rows: Sequence[Mapping[str, Any]], schema: Any, path: Path, compression: str = "snappy") -> None:
    """Write a Parquet file with these columns. Raises OSError."""
    parquet().write_table(arrow().Table.from_pylist(rows, schema=schema), path, compression=compression)


def turns_type() -> Any:
    """Return the type of a column with the turns of each response: a list of structs with the fields of `TurnText`."""
    pa = arrow()
    places = [(each.name, pa.int64()) for each in fields(TurnText) if each.name != "reward"]
    return pa.list_(pa.struct([*places, ("reward", pa.float64())]))


def turn_cells(turns: Sequence[TurnText]) -> list[dict[str, Any]] | None:
    """Return a response's cell in such a column; null without turns."""
    return [asdict(turn) for turn in turns] or None


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "pyarrow":
            raise
        raise UserError(
            "tables of responses and evaluations are Parquet files, and pyarrow is not installed: pip install pyarrow"
        ) from None
