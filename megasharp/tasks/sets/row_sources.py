"""Rows of a data set: from the hub or its cache, or from files on disk in the set's own schema.

The hub is asked unless `HF_HUB_OFFLINE` is set, as in jobs, whose sets are in the cache before they begin. Nothing
else imports `datasets`.

Files are parquet, JSONL, JSON (a list of rows), the last two also as .gz, or CSV. A folder that the library's
`save_to_disk` has written is read by it. Another folder, which may be a copy of a hub's
repository, is read file by file: those whose path names the source (its name or configuration), if any does, and of
those the ones that begin with the split's name, if any does.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from megasharp.common.errors import NotAtHand, UserError, one_line, reason_at
from megasharp.common.exit_codes import note
from megasharp.config.hub import absence, answer_of, go_offline, hub_is_off, is_commit, is_hub_id
from megasharp.tasks.data_fields import Fields, parse_object
from megasharp.tasks.sets.data_set import Source

if TYPE_CHECKING:
    from datasets import Dataset


def hub_rows(source: Source) -> Iterator[tuple[str, Fields]]:
    """Read the rows of a hub's table, each with its place.

    Raises UserError, which says how to go on without the hub, where they cannot be had.
    """
    if not hub_is_off():
        _ask(source)
    if source.files:
        files = [_fetched(source, name) for name in source.files]
        yield from (row for file in files for row in rows_of_file(file))
        return
    yield from _table(source)


def fetch_set(source: Source) -> None:
    """Bring a hub's table into the cache, where it is not there. Raises UserError as `hub_rows`.

    `datasets` reads a table offline only where it has prepared it, which a snapshot of the files is not.
    """
    next(hub_rows(source), None)


def _ask(source: Source) -> None:
    """Ask the hub for a set. Where it does not answer at once, which its libraries wait long for, the cache is read.

    Raises UserError where it answers that there is no such set for this user.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        answer_of(lambda: HfApi().dataset_info(source.hub, revision=source.revision))
        note(f"data set {source.hub} is fetched from the hub where the cache does not have it")
    except GatedRepoError as error:
        raise UserError(f"data set {source.hub} is gated: accept its terms on the hub, then set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise UserError(f"data set {source.hub} has no revision {source.revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{source.hub}: no such file or folder here, and no such data set on the hub; a private one needs HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        raise _not_had(source, error) from error
    except Exception as error:  # the library raises many kinds
        go_offline(f"{constants.ENDPOINT}: {one_line(error)[:120] or 'no answer'}")
        note(f"{absence()}; data set {source.hub} is read from the hub's cache")


def _table(source: Source) -> Iterator[tuple[str, Fields]]:
    try:
        try:
            table = _loaded(source, source.config)
        except ValueError as error:
            usual = [name for name in _USUAL_CONFIGS if re.search(rf"\b{name}\b", str(error))]
            if source.config is not None or "onfig" not in str(error) or not usual:
                raise
            note(f"data set {source.hub}: its configuration {usual[0]!r} is read; data.name names another")
            table = _loaded(source, usual[0])
    except ValueError as error:
        raise UserError(f"data set {source.hub}: {one_line(error)[:300]} (data.split, data.name)") from error
    except Exception as error:  # the library raises many kinds, and all mean the same to the user
        raise _not_had(source, error) from error
    # Of the folder in which the library keeps what it has made of a commit's files.
    for file in table.cache_files[:1]:
        if is_commit(folder := Path(file["filename"]).parent.name):
            _commits[source.hub, source.revision] = folder
    where = "/".join(filter(None, (source.hub, source.config, source.split)))
    begin, end = source.rows or (0, len(table))
    for number, fields in enumerate(islice(table, begin, end), start=begin):
        yield f"{where}, row {number}", fields


def _loaded(source: Source, config: str | None) -> Dataset:
    """Load a table at its revision, of which the library offline takes no notice: it reads the newest in its cache."""
    # Imported here: it takes a second, and most runs read files of their own.
    from datasets import config as settings
    from datasets import load_dataset
    from datasets.packaged_modules.cache.cache import Cache
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if source.revision is None or not constants.HF_HUB_OFFLINE:
        return load_dataset(source.hub, config, split=source.split, revision=source.revision)
    named = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=source.hub, repo_type="dataset") / "refs"
    ref = named / source.revision
    commit = ref.read_text().strip() if ref.is_file() else source.revision
    made = sorted(Path(settings.HF_DATASETS_CACHE).glob(f"*/{config or '*'}/*/{commit}"))
    names = [place.parts[-3] for place in made]
    if not made:
        raise FileNotFoundError(f"revision {source.revision}")
    if len(made) > 1 and config is None:
        raise ValueError(f"Config name is missing, one of {', '.join(names)}")
    name, version = made[0].parts[-3:-1]
    return Cache(
        repo_id=source.hub, dataset_name=source.name, config_name=name, version=version, hash=commit
    ).as_dataset(split=source.split)


# Of a repository with several configurations, the one that is meant where nobody names one.
_USUAL_CONFIGS = ("default", "main")


# Of sets that this process has read: by id and revision, the commit.
_commits: dict[tuple[str, str | None], str] = {}


def commit_read(hub: str | None, revision: str | None) -> str | None:
    """Return the commit of the hub's set that was read at this revision; None where none was, as of files on disk."""
    return None if hub is None else _commits.get((hub, revision))


def is_set_id(path: str) -> bool:
    """Return whether a path that does not exist reads as a data set's id on the hub. Example: "openai/gsm8k"."""
    return is_hub_id(path) and not path.endswith(SUFFIXES)


def own_rows(path: Path, split: str | None, config: str | None, revision: str | None) -> Iterator[tuple[str, Fields]]:
    """Read a user's own rows, each with its place: of a file or a folder, or of the hub where `path` is an id of it.

    What exists on disk wins. `split` None is train. Of a folder with files named after splits, those of `split` are
    read. Raises UserError where rows cannot be had, and for keys that say nothing of this path.
    """
    if path.exists() and (config or revision):
        key = f"data.name={config}" if config else f"data.revision={revision}"
        raise UserError(f"{path} is on this machine, and {key} is of a data set on the hub; leave it out")
    if path.is_file() and split is not None:
        raise UserError(f"{path} is a file, which has no splits; leave data.split={split} out")
    if (path.is_dir() and (path / "dataset_dict.json").exists()) or (path / "state.json").exists():
        yield from _saved(path, split)
    elif path.exists():
        named = Source("", "", split or "train")
        if split is not None and path.is_dir():
            files = files_of(path, named, alone=True)
            if not files[0].name.startswith(split):
                names = ", ".join(each.name for each in files)
                raise UserError(f"{path}: no file of the split {split!r} (data.split); there are {names}")
        yield from local_rows(path, named, alone=True)
    elif is_set_id(str(path)):
        yield from hub_rows(own_source(path, split, config, revision))
    else:
        raise UserError(f"{path}: no such file or folder, and no id of the hub (OWNER/NAME)")


def own_source(path: Path, split: str | None, config: str | None, revision: str | None) -> Source:
    """Return the hub's table that a user names by its id `path`."""
    return Source(path.name, str(path), split or "train", config, revision)


def _saved(path: Path, split: str | None) -> Iterator[tuple[str, Fields]]:
    try:
        from datasets import load_from_disk

        table = load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds, and all mean the same to the user
        raise UserError(f"{path}: cannot read this data set ({one_line(error)[:200]})") from error
    # A dictionary has a table for each split.
    if isinstance(table, dict):
        chosen = split or "train"
        if chosen not in table:
            raise UserError(f"{path}: no split {chosen!r} (data.split); there are {', '.join(table)}")
        table = table[chosen]
    elif split is not None and table.split not in (None, split):
        raise UserError(f"{path} is the split {table.split!r} alone; leave data.split={split} out")
    for number, fields in enumerate(table):
        yield f"{path}, row {number}", fields


def _fetched(source: Source, name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(source.hub, name, repo_type="dataset", revision=source.revision))
    except Exception as error:
        raise _not_had(source, error) from error


def _not_had(source: Source, error: Exception) -> NotAtHand:
    cached = f"is not in the cache (HF_HOME, {os.environ.get('HF_HOME', '~/.cache/huggingface')})"
    state = f"{cached} and {absence()}" if hub_is_off() else f"could not be fetched ({one_line(error)[:200]})"
    config = f" ({source.config})" if source.config else ""
    at = f", revision {source.revision}" if source.revision else ""
    return NotAtHand(
        f"data set {source.hub}{config} {state}{at}; or give path: a parquet or JSON file, or folder, with its rows"
    )


SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".csv")
_BATCH_ROWS = 1000


def local_rows(path: Path, source: Source, alone: bool) -> Iterator[tuple[str, Fields]]:
    """Read the rows of a file, or of the files of a folder that are the source's, each with its place.

    `alone` says that the set has no other source: then a file needs no name. Raises UserError where there is no such
    file, where one cannot be read, or where one of several sources has no row.
    """
    files = files_of(path, source, alone)
    rows = (row for file in files for row in rows_of_file(file))
    empty = True
    for row in islice(rows, *source.rows) if source.rows else rows:
        empty = False
        yield row
    if empty and not alone:
        raise UserError(
            f"{', '.join(map(str, files))}: no row of {source.name}, which this set has beside its other parts; "
            "copy the file again"
        )


def files_of(path: Path, source: Source, alone: bool) -> list[Path]:
    """The data files under `path` that hold a source's rows, by name."""
    if path.is_file():
        if not alone:
            raise UserError(
                f"{path}: this set has several parts; give a folder with a file or folder called {source.name} and "
                "one for each other part"
            )
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; path names a parquet or JSON file, or a folder of them")
    found = [each for each in sorted(path.rglob("*")) if each.is_file() and each.name.endswith(SUFFIXES)]
    named = [each for each in found if _is_named(each.relative_to(path), source)]
    if not named and not alone:
        raise UserError(f"{path}: no file or folder called {source.name} ({', '.join(SUFFIXES)}) in this folder")
    files = named or found
    files = [each for each in files if each.name.startswith(source.split)] or files
    if not files:
        raise UserError(f"{path}: no data file in this folder; it needs {', '.join(SUFFIXES)}")
    return files


def _is_named(path: Path, source: Source) -> bool:
    """Find the source's name or configuration, in any case, as a folder of a relative path or before its file's end."""
    names = {name.lower() for name in (source.name, source.config) if name}
    *folders, file = path.as_posix().lower().split("/")
    return not names.isdisjoint(folders) or any(file.startswith((f"{n}.", f"{n}-", f"{n}_")) for n in names)


def rows_of_file(path: Path) -> Iterator[tuple[str, Fields]]:
    """Read the rows of one file. Raises UserError, naming the file and the row, for what is no table of objects."""
    name = path.name
    if name.endswith(".parquet"):
        yield from _parquet(path)
    elif name.endswith((".jsonl", ".jsonl.gz")):
        yield from _lines(path)
    elif name.endswith((".json", ".json.gz")):
        yield from _list(path)
    elif name.endswith(".csv"):
        yield from _csv(path)
    else:
        raise UserError(f"{path}: unknown kind of file; it must end in one of {', '.join(SUFFIXES)}")


def _parquet(path: Path) -> Iterator[tuple[str, Fields]]:
    # Imported here: only sets read parquet.
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(_BATCH_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", fields
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot read this parquet file ({one_line(error)})") from error


def _lines(path: Path) -> Iterator[tuple[str, Fields]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield parse_object(line, f"{path}:{number}")
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot read this file ({reason_at(error, path)})") from error


def _csv(path: Path) -> Iterator[tuple[str, Fields]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            names = [*filter(None, rows.fieldnames or ())]
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise UserError(f"{path}: its first line names the column {twice[0]!r} twice; rename one")
            for number, fields in enumerate(rows, start=1):
                if None in fields or None in fields.values():
                    raise UserError(f"{path}, row {number}: another number of columns than its first line has")
                yield f"{path}, row {number}", fields
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot read this CSV file ({reason_at(error, path)})") from error


def _list(path: Path) -> Iterator[tuple[str, Fields]]:
    """A list of objects, or an object that holds one, as BIG-Bench Hard's `{"canary": ..., "examples": [...]}`."""
    try:
        value = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    except json.JSONDecodeError as error:
        # One object a line is often called .json too.
        if error.msg == "Extra data":
            yield from _lines(path)
            return
        raise UserError(f"{path}: cannot read this JSON file ({one_line(error)})") from error
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot read this JSON file ({reason_at(error, path)})") from error
    lists = [each for each in value.values() if isinstance(each, list)] if isinstance(value, dict) else [value]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise UserError(f"{path}: a list of rows must stand here; write one, or one object a line in a .jsonl file")
    for number, fields in enumerate(lists[0], start=1):
        if not isinstance(fields, dict):
            raise UserError(f"{path}, row {number}: not a JSON object")
        yield f"{path}, row {number}", fields
