"""Storing the samples of a running evaluation, so that a kill loses only what was in flight.

`add` commits: one record batch in a journal, handed to the operating system before it returns. When a journal is full
its rows become a part, sorted and compressed, and a new journal begins. The next attempt takes over the journal that
a killed one left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasharp.common.errors import UserError
from megasharp.common.files import completed, flush, folder_errors
from megasharp.evals.stored_samples import (
    CHECKSUM,
    FOLDER,
    SECONDS,
    SamplesInfo,
    StoredSample,
    checksum,
    journals,
    parts,
    read_journal,
    read_samples,
    samples_info,
    schema,
    stored_seconds,
)
from megasharp.metrics.parquet import arrow, parquet, turn_cells

if TYPE_CHECKING:
    import pyarrow as pa

# Bytes of a journal, which is not compressed: its part has about a third.
PART_BYTES = 64 << 20
# Bytes of a row group before compression: a reader holds a few of them.
GROUP_BYTES = 4 << 20
# Texts that could not be bounded more finely than this, or an eighth of a small bound, are no longer kept.
_LEAST = 1 << 20
# Progress of a running evaluation as format 2 (up to e9015b9, 2026-11-26) had it.
_OLD = ".samples"
_SHORT = ["problem", "finish", "outcome", "answer", "detail"]


def check_identity(found: Mapping[str, str], asked: Mapping[str, str], where: str, hint: str = "") -> None:
    """Raise UserError, naming the first difference, unless both are the same evaluation.

    `where` begins its line, and `hint` comes before what can be done.
    """
    for name in (*asked, *found):
        there, here = found.get(name), asked.get(name)
        if there != here:
            raise UserError(
                f"{where} of another evaluation ({name} {there or 'unknown'}, now {here or 'unknown'}); "
                f"{hint}give another --out, or remove it"
            )


class SampleStore:
    """The samples of one suite in an evaluation's folder; one process at a time writes there.

    `size` are the bytes of its parts, `seconds` those that earlier attempts took. Texts and token ids are kept as
    `info.kept` says, until the parts have `room` bytes (None: no bound); then only answers are, and `full` is called
    once. What an earlier attempt left stays as it is.
    """

    def __init__(
        self, folder: Path, info: SamplesInfo, room: int | None = None, full: Callable[[], None] = lambda: None
    ) -> None:
        """Open the store; nothing is written before the first commit.

        Raises UserError where the folder holds samples of another evaluation or a later release, or cannot be read.
        """
        if (old := folder / f"{info.suite}{_OLD}").is_dir():
            raise UserError(
                f"{old}: samples in the format of an earlier release, which this one does not continue; finish the "
                "evaluation with that release, or remove the folder"
            )
        found = samples_info(folder, info.suite)
        if found is not None:
            where, its = f"{folder / FOLDER} holds samples of {info.suite}", "its own settings continue it; for others "
            check_identity(found.identity, info.identity, where, its)
        self.seconds = 0.0 if found is None else stored_seconds(folder, info.suite)
        self._folder = folder
        self._info = info
        self._room, self._full = room, full
        self._least = _LEAST if room is None else min(_LEAST, room // 8)
        self._file: BufferedWriter | None = None
        self._path = Path()
        self._writer: Any = None
        self.size = self._size()
        self._texts = info.kept in ("texts", "tokens")

    def stored(self) -> Iterator[StoredSample]:
        """Yield what was there, without texts."""
        return read_samples(self._folder, self._info.suite, texts=False)

    def add(self, samples: Sequence[StoredSample], seconds: float = 0.0) -> None:
        """Commit samples, and the seconds since the last commit: they outlive the process.

        Raises UserError where the disk refuses.
        """
        if not samples:
            return
        with folder_errors(self._folder / FOLDER):
            if self._file is None:
                self._bound()
                self._begin()
            assert self._file is not None
            self._write(self._batch(samples), seconds)
            self._file.flush()
            most = PART_BYTES
            if self._texts and self._room is not None:
                # A journal becomes a part before it could exceed the bound.
                most = min(most, max(self._room - self.size, self._least))
            if self._file.tell() >= most:
                self._roll()

    def close(self) -> None:
        """Close the journal, which stays for the next attempt."""
        if self._file is not None:
            self._writer.close()
            self._file.close()
            self._file = None

    def finish(self) -> None:
        """Make the last part: the evaluation is complete. With `none` remove all. Raises UserError as `add` does."""
        if self._info.kept == "none":
            self.close()
            self.remove()
            return
        with folder_errors(self._folder / FOLDER):
            if self._file is None and journals(self._folder, self._info.suite):
                self._begin()
            self._roll()

    def remove(self) -> None:
        """Remove the suite's samples."""
        self.close()
        for path in (*parts(self._folder, self._info.suite), *journals(self._folder, self._info.suite)):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            (self._folder / FOLDER).rmdir()

    def _size(self) -> int:
        """Return the bytes of the parts."""
        return sum(path.stat().st_size for path in parts(self._folder, self._info.suite))

    def _begin(self) -> None:
        """Begin a journal with the rows that killed attempts left in theirs."""
        left = journals(self._folder, self._info.suite)
        at = self._folder / FOLDER
        at.mkdir(parents=True, exist_ok=True)
        for partial in at.glob(f".{self._info.suite}-*.partial"):
            partial.unlink(missing_ok=True)
        attempt = 1 + max((int(path.suffixes[-2][1:]) for path in left), default=0)
        self._path = at / f"{self._info.suite}.{attempt}.arrows"
        self._file = self._path.open("xb")
        self._writer = arrow().ipc.new_stream(self._file, schema(self._info))
        for path in left:
            table, seconds = read_journal(path)
            for batch in table.to_batches():
                self._write(batch, seconds)
                seconds = 0.0
        self._file.flush()
        if left:
            flush(self._path)
            flush(at)
            for path in left:
                path.unlink()

    def _write(self, batch: pa.RecordBatch, seconds: float) -> None:
        self._writer.write_batch(batch, {SECONDS: repr(seconds), CHECKSUM: checksum(batch)})

    def _roll(self) -> None:
        """Make a part of the journal, then begin another with the next commit."""
        if self._file is None:
            return
        self.close()
        table, seconds = read_journal(self._path)
        if table.num_rows:
            table = table.sort_by([("number", "ascending"), ("greedy", "descending"), ("index", "ascending")])
            there = parts(self._folder, self._info.suite)
            number = 1 + int(there[-1].stem.rpartition("-")[2]) if there else 0
            with completed(self._folder / FOLDER / f"{self._info.suite}-{number:05d}.parquet") as temporary:
                rows = max(1, table.num_rows * GROUP_BYTES // max(1, table.nbytes))
                metadata = {**schema(self._info).metadata, SECONDS: repr(seconds)}
                table = table.replace_schema_metadata(metadata)
                parquet().write_table(table, temporary, compression="zstd", row_group_size=rows, use_dictionary=_SHORT)
        self._path.unlink()
        self.size = self._size()
        self._bound()

    def _bound(self) -> None:
        """Keep no more texts where there is no room for them."""
        if self._texts and self._room is not None and self.size >= self._room - self._least:
            self._texts = False
            self._full()

    def _batch(self, samples: Sequence[StoredSample]) -> pa.RecordBatch:
        pa = arrow()
        if not self._texts:
            samples = [replace(sample, text=None, token_ids=None) for sample in samples]
        elif self._info.kept == "texts":
            samples = [replace(sample, token_ids=None) for sample in samples]
        to = schema(self._info)
        names = [each.name for each in fields(StoredSample)]
        arrays = [pa.array([_cell(sample, name) for sample in samples], to.field(name).type) for name in names]
        return pa.RecordBatch.from_arrays(arrays, schema=to)


def _cell(sample: StoredSample, name: str) -> object:
    return turn_cells(sample.turns) if name == "turns" else getattr(sample, name)
