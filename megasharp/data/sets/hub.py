"""Rows from the hub, or from what an earlier visit left in its cache: the only place that imports `datasets`.

Commands keep the hub off (`HF_HUB_OFFLINE=1`, `megasharp/command.py`), so that a job on a node without a network fails
at once and says so; `HF_HUB_OFFLINE=0` lets a set be fetched, once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megasharp.data.lines import Fields
from megasharp.data.sets.base import Source
from megasharp.data.sets.local import rows_of_file
from megasharp.errors import UserError, one_line

_ON = {"", "0", "false", "no", "off"}


def hub_rows(source: Source) -> Iterator[tuple[str, Fields]]:
    """The rows of a table, each with where it stands.

    Raises UserError, which says how to go on without the hub, where they cannot be had.
    """
    if source.files:
        rows = (row for name in source.files for row in rows_of_file(_fetched(source, name)))
        yield from rows
        return
    yield from _table(source)


def _table(source: Source) -> Iterator[tuple[str, Fields]]:
    try:
        # Imported here: it takes a second, and most runs read files of their own.
        from datasets import load_dataset

        table = load_dataset(source.hub, source.config, split=source.split, revision=source.revision)
    except Exception as error:  # the library raises many kinds, and all mean the same to the user
        raise _not_had(source, error) from error
    where = "/".join(filter(None, (source.hub, source.config, source.split)))
    begin, end = source.rows or (0, len(table))
    for number, fields in enumerate(islice(table, begin, end), start=begin):
        yield f"{where}, row {number}", fields


def _fetched(source: Source, name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(source.hub, name, repo_type="dataset", revision=source.revision))
    except Exception as error:
        raise _not_had(source, error) from error


def _not_had(source: Source, error: Exception) -> UserError:
    off = os.environ.get("HF_HUB_OFFLINE", "").lower() not in _ON
    cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
    state = (
        f"is not in the cache (HF_HOME, {cache}) and the hub is off; HF_HUB_OFFLINE=0 in the environment fetches it"
        if off
        else f"could not be fetched ({one_line(error)[:200]})"
    )
    config = f" ({source.config})" if source.config else ""
    return UserError(
        f"data set {source.hub}{config} {state}; or give path: a parquet or JSON file, or folder, with its rows"
    )
