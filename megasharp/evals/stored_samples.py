"""The samples of an evaluation on disk, as records, and how they are read; `sample_store.py` writes them.

Below an evaluation's folder lie `samples/<suite>-00000.parquet` and further parts, whole ones only, and while it runs a
journal, `samples/<suite>.<attempt>.arrows`: an Arrow stream with a record batch for each commit. What a killed process
wrote of a batch is dropped. A sample that is in a journal and in a part, because a process was killed between the two,
is one sample.

Reading needs neither torch nor a model. It goes through the samples in the order of problems with the texts of a few
row groups in memory, however many there are.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megasharp.common.errors import UserError, reason_at
from megasharp.common.formats import Keep, read_table_stamp, table_stamp
from megasharp.common.records import FinishReason, Outcome, TurnText
from megasharp.metrics.parquet import arrow, parquet, turns_type

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "samples"
# Metadata of a commit and of a part: the seconds that its samples took.
SECONDS = b"seconds"
# Of a commit: the checksum of its columns.
CHECKSUM = b"crc32"
# A sample's place among all of its suite.
_KEY = ("number", "greedy", "index")
# Row groups that are in memory while samples are read; each has about `sample_store.GROUP_BYTES`.
_GROUPS = 24


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One judged sample.

    `number` is the place of its problem in the suite, `index` its own among the samples of the problem, both from 0; a
    greedy sample has index 0. `seed` is the engine's. `text` and `token_ids` are None where they are not kept. `tokens`
    counts the policy's, the end token included. `entropy` to `lambda_sample` are means over them, in nats, as in
    `samples.TokenFigures`. `sampled_s` are the seconds from its request to its answer, `judged_s` its
    share of the seconds of judging. `in_thinking`: its prompt opens thinking, so that it begins inside. `turns` are
    those of a response with an environment; places are in the whole text, whether it is kept or not.
    """

    problem: str
    number: int
    index: int
    greedy: bool
    seed: int
    text: str | None
    token_ids: Sequence[int] | None
    finish: FinishReason
    outcome: Outcome
    reward: float
    answer: str | None
    detail: str
    tokens: int
    entropy: float | None = None
    entropy_sampled: float | None = None
    lambdas: tuple[float, ...] = ()
    lambda_sample: float | None = None
    sampled_s: float | None = None
    judged_s: float | None = None
    in_thinking: bool = False
    turns: tuple[TurnText, ...] = ()

    @property
    def key(self) -> tuple[int, bool, int]:
        """Its place among all samples of the suite; greedy ones come first in a problem."""
        return self.number, not self.greedy, self.index


@dataclass(frozen=True, slots=True)
class SamplesInfo:
    """The evaluation that samples are of, as their files say.

    `setting` has the fields of `result.EvalSetting`. `identity` names all that must be the same for samples to be the
    same. `kept` is what was asked for; a sample may have less where the bound of bytes was reached.
    """

    suite: str
    setting: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    kept: Keep = "texts"


@cache
def columns() -> pa.Schema:
    """A row for each sample: the fields of `StoredSample`."""
    pa = arrow()
    types = {
        "problem": pa.string(),
        "number": pa.int32(),
        "index": pa.int32(),
        "greedy": pa.bool_(),
        "seed": pa.int64(),
        "text": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "finish": pa.string(),
        "outcome": pa.string(),
        "reward": pa.float64(),
        "answer": pa.string(),
        "detail": pa.string(),
        "tokens": pa.int32(),
        "entropy": pa.float64(),
        "entropy_sampled": pa.float64(),
        "lambdas": pa.list_(pa.float64()),
        "lambda_sample": pa.float64(),
        "sampled_s": pa.float32(),
        "judged_s": pa.float32(),
        "in_thinking": pa.bool_(),
        "turns": turns_type(),
    }
    return pa.schema([pa.field(each.name, types[each.name]) for each in fields(StoredSample)])


def schema(info: SamplesInfo) -> pa.Schema:
    """Return the columns with what a file says of its evaluation, its format first."""
    said = {"suite": info.suite, "kept": info.kept}
    trees = {"setting": json.dumps(dict(info.setting)), "identity": json.dumps(dict(info.identity))}
    return columns().with_metadata(table_stamp("evaluation samples") | said | trees)


def parts(folder: Path, suite: str) -> list[Path]:
    """Return the parts of a suite in an evaluation's folder, in order."""
    return _named(folder, rf"{re.escape(suite)}-\d{{5,}}\.parquet")


def journals(folder: Path, suite: str) -> list[Path]:
    """Return the journals of a suite: one while it runs or after a kill, more after a kill between two."""
    return _named(folder, rf"{re.escape(suite)}\.\d+\.arrows")


def suites_with_samples(folder: Path) -> list[str]:
    """Return the suites of which an evaluation's folder holds samples, complete or not, by name."""
    found = (re.fullmatch(r"(.+)(?:-\d{5,}\.parquet|\.\d+\.arrows)", path.name) for path in (folder / FOLDER).glob("*"))
    return sorted({match[1] for match in found if match})


def _named(folder: Path, pattern: str) -> list[Path]:
    found = (path for path in (folder / FOLDER).glob("*") if re.fullmatch(pattern, path.name))
    return sorted(found, key=lambda path: (len(path.name), path.name))


def samples_info(folder: Path, suite: str) -> SamplesInfo | None:
    """Return the evaluation of a suite's samples; None where there are none.

    Raises UserError for files of a later release, of two evaluations, or that cannot be read.
    """
    found: SamplesInfo | None = None
    for path in (*parts(folder, suite), *journals(folder, suite)):
        here = _info(path)
        if here is None:
            continue
        if found is not None and here.identity != found.identity:
            raise UserError(f"{path}: of another evaluation than the samples beside it; remove one of the two")
        found = here
    return found


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of reading a file of samples into one line for the user."""
    try:
        yield
    except (OSError, arrow().ArrowException, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({reason_at(error, path)}); remove it to sample its part again"
        ) from error


def _info(path: Path) -> SamplesInfo | None:
    """Return what a file says; None for a journal that was cut off before it said anything."""
    if path.suffix == ".parquet":
        with _reading(path):
            metadata = parquet().read_schema(path).metadata
    else:
        metadata = read_journal(path)[0].schema.metadata
    if not metadata:
        return None
    read_table_stamp(path, "evaluation samples", metadata)
    with _reading(path):
        said = {key.decode(): value.decode() for key, value in metadata.items()}
        kept: Any = said["kept"]
        return SamplesInfo(said["suite"], json.loads(said["setting"]), json.loads(said["identity"]), kept)


def read_journal(path: Path) -> tuple[pa.Table, float]:
    """Return what is whole of a journal, mapped, not read, and the seconds that its commits took.

    It ends before the first batch that was not written to its end.
    """
    pa = arrow()
    batches: list[Any] = []
    seconds = 0.0
    try:
        with pa.ipc.open_stream(pa.memory_map(str(path))) as reader:
            found = reader.schema
            while True:
                try:
                    batch, said = reader.read_next_batch_with_custom_metadata()
                    batch.validate()
                except (StopIteration, OSError, pa.ArrowException):
                    return _with_newer(pa.Table.from_batches(batches, schema=found)), seconds
                if (said or {}).get(CHECKSUM) != checksum(batch):
                    return _with_newer(pa.Table.from_batches(batches, schema=found)), seconds
                batches.append(batch)
                seconds += float(said[SECONDS])
    except (OSError, pa.ArrowException):
        return columns().empty_table(), 0.0


def _with_newer(table: pa.Table) -> pa.Table:
    """Add the column that files before 2026-11-28 lack."""
    if "turns" in table.column_names:
        return table
    added = columns().field("turns")
    # A chunk for each batch, so that batches stay as they were written.
    nothing = [arrow().array([None] * batch.num_rows, added.type) for batch in table.to_batches()]
    return table.append_column(added, arrow().chunked_array(nothing, added.type))


def checksum(batch: pa.RecordBatch) -> bytes:
    """Return the CRC-32 of a batch's buffers, as text: Arrow's streams have none of their own."""
    buffers = (buffer for column in batch.columns for buffer in column.buffers() if buffer is not None)
    return str(reduce(lambda crc, buffer: zlib.crc32(buffer, crc), buffers, 0)).encode()


def stored_seconds(folder: Path, suite: str) -> float:
    """Return the seconds that all attempts spent on the stored samples."""
    seconds = sum(read_journal(path)[1] for path in journals(folder, suite))
    for path in parts(folder, suite):
        with _reading(path):
            seconds += float(parquet().read_schema(path).metadata.get(SECONDS, 0.0))
    return seconds


# Piece and row of samples, [samples, 2].
_Places = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows that are read together: a row group of a part, or a journal."""

    path: Path
    group: int | None

    def read(self, names: Sequence[str]) -> pa.Table:
        if self.group is None:
            return read_journal(self.path)[0].select(names)
        with _reading(self.path):
            return parquet().ParquetFile(self.path).read_row_group(self.group, columns=list(names))


def read_samples(folder: Path, suite: str, texts: bool = True) -> Iterator[StoredSample]:
    """Yield a suite's samples: problems in the suite's order, of each the greedy one first, the others by index.

    Without `texts`, `text` and `token_ids` are None, and reading is ten times as fast. A running evaluation's samples
    are read as far as they are committed. Raises UserError for files that cannot be read, or of a later release.
    """
    names = [name for name in columns().names if texts or name not in ("text", "token_ids")]
    pieces = _pieces(folder, suite)
    if pieces:
        yield from _read(pieces, _in_order(pieces), names)


def read_columns(folder: Path, suite: str, names: Sequence[str]) -> pa.Table:
    """Return some short columns of all samples of a suite, in the order of `read_samples`. Raises as it does."""
    pieces = _pieces(folder, suite)
    return _columns(pieces, _in_order(pieces), names) if pieces else columns().empty_table().select(names)


def count_samples(folder: Path, suite: str) -> int:
    """Count a suite's samples; raises as `read_samples` does. Of complete evaluations only the files' ends are read."""
    samples_info(folder, suite)
    if journals(folder, suite):
        return int(read_columns(folder, suite, ("number",)).num_rows)
    count = 0
    for path in parts(folder, suite):
        with _reading(path):
            count += int(parquet().read_metadata(path).num_rows)
    return count


def count_texts_missing(folder: Path, suite: str) -> tuple[int, int]:
    """Return how many samples of a suite have no text, without those that an engine aborted, and how many there are.

    Raises UserError as `read_samples` does.
    """
    pieces = _pieces(folder, suite)
    missing: list[np.ndarray[Any, np.dtype[np.bool_]]] = []
    for piece in pieces:
        table = piece.read(("text", "finish"))
        missing.append(table["text"].is_null().to_numpy() & (table["finish"].to_numpy() != FinishReason.ABORT.value))
    if not pieces:
        return 0, 0
    places, starts = _in_order(pieces), np.cumsum([0, *map(len, missing)])
    return int(np.concatenate(missing)[starts[places[:, 0]] + places[:, 1]].sum()), len(places)


def read_chosen(folder: Path, suite: str, keys: Collection[tuple[int, bool, int]]) -> Iterator[StoredSample]:
    """Yield the samples of a suite that have one of `keys`, texts included; only row groups with one of them are read.

    Raises UserError as `read_samples` does.
    """
    pieces = _pieces(folder, suite)
    if pieces and keys:
        places = _in_order(pieces)
        table = _columns(pieces, places, _KEY)
        number, greedy, index = (table[name].to_pylist() for name in _KEY)
        found = zip(number, (not each for each in greedy), index, strict=True)
        wanted = np.fromiter((key in keys for key in found), dtype=bool, count=table.num_rows)
        yield from _read(pieces, places[wanted], columns().names)


def _pieces(folder: Path, suite: str) -> list[_Piece]:
    samples_info(folder, suite)
    return [*_groups(parts(folder, suite)), *(_Piece(path, None) for path in journals(folder, suite))]


def _columns(pieces: Sequence[_Piece], places: _Places, names: Sequence[str]) -> pa.Table:
    tables = [piece.read(names) for piece in pieces]
    starts = np.cumsum([0, *(table.num_rows for table in tables)])
    return arrow().concat_tables(tables).take(starts[places[:, 0]] + places[:, 1])


def _read(pieces: Sequence[_Piece], places: _Places, names: Sequence[str]) -> Iterator[StoredSample]:
    """Yield the samples at `places`."""

    @lru_cache(maxsize=_GROUPS)
    def rows_of(piece: int) -> pa.Table:
        return pieces[piece].read(names)

    # Rows that follow each other in one piece are converted together, but not so many that their texts fill memory.
    ends = np.flatnonzero(np.diff(places[:, 0])) + 1
    for run in np.split(places, ends):
        for start in range(0, len(run), 64):
            some = run[start : start + 64]
            yield from _samples(rows_of(int(some[0, 0])).take(some[:, 1]))


def _groups(paths: Sequence[Path]) -> Iterator[_Piece]:
    for path in paths:
        with _reading(path):
            count = parquet().read_metadata(path).num_row_groups
        yield from (_Piece(path, group) for group in range(count))


def _in_order(pieces: Sequence[_Piece]) -> _Places:
    """Return the place of every sample; one that is stored twice is there once."""
    tables = [piece.read(_KEY) for piece in pieces]
    number, greedy, index = (
        np.concatenate([table[name].to_numpy().astype(np.int64) for table in tables]) for name in _KEY
    )
    order = np.lexsort((index, 1 - greedy, number))
    keys = np.stack((number, greedy, index), axis=1)[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    sizes = [table.num_rows for table in tables]
    piece = np.repeat(np.arange(len(pieces)), sizes)
    row = np.concatenate([np.arange(size) for size in sizes])
    return np.stack((piece, row), axis=1)[order][first]


def _samples(table: pa.Table) -> Iterator[StoredSample]:
    missing: dict[str, Any] = {name: None for name in ("text", "token_ids") if name not in table.column_names}
    ids: list[Any] = [None] * table.num_rows
    if "token_ids" in table.column_names:
        column = table["token_ids"].combine_chunks()
        ids = [each.values.to_numpy().tolist() if each.is_valid else None for each in column]
        table = table.drop_columns(["token_ids"])
    for record, token_ids in zip(table.to_pylist(), ids, strict=True):
        turns = tuple(TurnText(**turn) for turn in record.get("turns") or ())
        texts = missing | {"token_ids": token_ids, "lambdas": tuple(record["lambdas"]), "turns": turns}
        kinds = {"finish": FinishReason(record["finish"]), "outcome": Outcome(record["outcome"])}
        yield StoredSample(**record | texts | kinds)
