"""pyarrow, imported when the first table is read or written: a run that keeps no tables starts without it.

pyarrow takes 150 MB of disk, which a GPU machine rented for an hour may lack.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasharp.common.errors import UserError


def arrow() -> Any:
    """Import and return `pyarrow`. Raises UserError where it is not installed."""
    return _imported("pyarrow")


def parquet() -> Any:
    """Import and return `pyarrow.parquet`. Raises UserError where pyarrow is not installed."""
    return _imported("pyarrow.parquet")


def write_rows(rows: Sequence[Mapping[str, Any]], schema: Any, path: Path, compression: str = "snappy") -> None:
    """Write a Parquet file with these columns. Raises OSError."""
    parquet().write_table(arrow().Table.from_pylist(rows, schema=schema), path, compression=compression)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "pyarrow":
            raise
        raise UserError(
            "tables of responses and evaluations are Parquet files, and pyarrow is not installed: pip install pyarrow"
        ) from None
