"""metrics.jsonl and TensorBoard of a run, which a resumed run continues without gap or overlap.

metrics.jsonl holds one JSON object per line: `step`, `time` (seconds since 1970) and metrics. JSON has no NaN
and no infinity: such values are null. One step may have several lines (training, evaluation), the first of which is its
training. Lines are in the order of their steps, so what concerns the end of a long run is read from its end.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import from_json

from megasharp.common.errors import UserError, reason_at
from megasharp.common.files import cut_off, flush, settle_cuts

if TYPE_CHECKING:
    from megasharp.metrics.tensorboard import TensorBoard

METRICS_FILE = "metrics.jsonl"
RESERVED = frozenset({"step", "time"})
# Bytes that are read at once from a file's end: about sixteen rows.
_BLOCK = 1 << 16

Row = dict[str, float | None]


class MetricLog:
    """Appends metrics to `folder`/metrics.jsonl and, on request, to `folder`/tensorboard.

    With `resumed_step` k the log continues after step k (-1: before all): rows of later steps move to the same paths
    in `superseded`, and a torn last line goes.

    Raises:
        UserError: the log exists although the run is new, holds a broken line among those that move, or cannot be
        written.
    """

    def __init__(
        self, folder: Path, *, tensorboard: bool, resumed_step: int | None, superseded: Path | None = None
    ) -> None:
        self._path = folder / METRICS_FILE
        if resumed_step is not None:
            assert superseded is not None, "a resumed log moves rows there"
            try:
                _continue_after(folder, resumed_step, superseded)
            except OSError as error:
                raise _cannot_write(self._path, error) from error
        elif self._path.exists():
            raise UserError(
                f"{self._path}: this run already has metrics; resume it with --resume or choose another name"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        self._tensorboard: TensorBoard | None = None
        if tensorboard:
            # Imported here because runs without TensorBoard need not wait for it.
            from megasharp.metrics.tensorboard import TensorBoard

            try:
                self._tensorboard = TensorBoard(folder / "tensorboard", resumed_step, superseded)
            except OSError as error:
                raise _cannot_write(folder / "tensorboard", error) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line for `step` and hand it to the operating system, so that a killed run keeps it."""
        assert not RESERVED & values.keys(), sorted(RESERVED & values.keys())
        finite = {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
        row = {"step": step, "time": time.time(), **finite}
        try:
            self._file.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
            self._file.flush()
            if self._tensorboard is not None:
                self._tensorboard.write(step, values)
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def sync(self) -> None:
        """Force what was written to metrics.jsonl to the disk, so that a machine that loses power keeps it."""
        try:
            os.fsync(self._file.fileno())
            flush(self._path.parent)
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def close(self) -> None:
        """Close the files."""
        try:
            self._file.close()
            if self._tensorboard is not None:
                self._tensorboard.close()
        except OSError as error:
            raise _cannot_write(self._path, error) from error


def read_metrics(folder: Path) -> list[Row]:
    """Return the rows of `folder`/metrics.jsonl in the order they were written; none when the file is missing.

    A torn last line, which a killed run leaves, is skipped.

    Raises:
        UserError: the file cannot be read, or a line before the last is not a JSON object with a step.
    """
    path = folder / METRICS_FILE
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _cannot_read(path, error) from error
    rows = [parse_row(line) for line in lines]
    if rows and rows[-1] is None:
        rows.pop()
    for number, row in enumerate(rows, start=1):
        if row is None:
            raise _broken(path, number)
    return [row for row in rows if row is not None]


def rows_from_end(folder: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows that `read_metrics` returns, the last first, each with its place in bytes; reads as far as asked.

    Raises UserError as `read_metrics` does.
    """
    path = folder / METRICS_FILE
    try:
        size = path.stat().st_size
        for place, line in _lines_from_end(path):
            row = parse_row(line)
            if row is not None:
                yield place, row
            elif place + len(line) < size:
                with path.open("rb") as file:
                    raise _broken(path, 1 + file.read(place).count(b"\n"))
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot_read(path, error) from error


def _lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line of a file with its place in bytes, the last first."""
    with path.open("rb", buffering=0) as file:
        begin, tail = file.seek(0, os.SEEK_END), b""
        while begin > 0:
            block = min(_BLOCK, begin)
            begin -= block
            file.seek(begin)
            tail = file.read(block) + tail
            end = len(tail)
            while (cut := tail.rfind(b"\n", 0, end - 1)) >= 0:
                yield begin + cut + 1, tail[cut + 1 : end]
                end = cut + 1
            tail = tail[:end]
        if tail:
            yield 0, tail


def _continue_after(folder: Path, last: int, superseded: Path) -> None:
    """Move the rows of steps after `last` to `superseded`, and make what stays end with a whole line."""
    path = folder / METRICS_FILE
    settle_cuts(path, superseded.parent.glob("*"))
    if not path.exists():
        return
    place, line = next(_lines_from_end(path), (0, b"\n"))
    broken = parse_row(line) is None
    if broken and not line.endswith(b"\n"):
        # A killed process was writing it.
        os.truncate(path, place)
    elif not broken and not line.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    place_of_first = place if broken and line.endswith(b"\n") and line.strip() else None
    for place, row in rows_from_end(folder):
        if (row["step"] or 0) > last:
            place_of_first = place
        elif "time/step" in row:
            # A step's training is its first row, so no row of a later step lies before this one.
            break
    if place_of_first is not None:
        cut_off(path, place_of_first, superseded / METRICS_FILE)


# A file up to this size is read whole: about 1,300 rows of a step.
_WHOLE = 1 << 22
# About the bytes of a row: reading one here and there brings little more.
_ROW = 1 << 12
# Bytes in which a row of a step is looked for line by line.
_NEAR = 1 << 16


def sampled_rows(folder: Path, most: int) -> list[Row]:
    """Return all rows of a short metrics.jsonl; of a long one about `most`, evenly spaced, and the last of them all.

    So a picture of a long run, and its last row, cost what those of a short one do. Lines that are no rows are left
    out. Raises UserError where the file cannot be read.
    """
    path = folder / METRICS_FILE
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=_ROW) as file:
            lines = file.readlines() if size <= _WHOLE else [file.readline()]
            for part in range(1, most):
                # Nothing twice where rows are longer than the distance.
                if (place := part * (size - _NEAR) // most) > file.tell():
                    file.seek(place)
                    file.readline()
                    lines.append(file.readline())
            file.seek(max(file.tell(), size - _NEAR))
            lines += file.readlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _cannot_read(path, error) from error
    return [row for line in lines if (row := parse_row(line)) is not None]


def rows_of(folder: Path, step: int) -> list[Row]:
    """Return the rows of one step, found by halves: lines are in the order of their steps.

    Raises UserError where the file cannot be read.
    """
    path = folder / METRICS_FILE
    try:
        with path.open("rb") as file:
            low, high = 0, path.stat().st_size
            while high - low > _NEAR:
                file.seek((low + high) // 2)
                file.readline()
                place = file.tell()
                row = parse_row(file.readline())
                if row is not None and (row["step"] or 0) < step:
                    low = place
                else:
                    high = (low + high) // 2
            file.seek(low)
            found = []
            for line in file:
                row = parse_row(line)
                if row is not None and (row["step"] or 0) > step:
                    break
                if row is not None and row["step"] == step:
                    found.append(row)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _cannot_read(path, error) from error
    return found


def parse_row(line: bytes) -> Row | None:
    """Parse a line of metrics.jsonl; None where it is torn or no row."""
    try:
        # Three times as fast as json, which is most of the time that the screen of a long run takes.
        row = from_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path}: cannot write the metrics ({reason_at(error, path)}); free space or repair the run folder"
    )


def _cannot_read(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot read the metrics ({reason_at(error, path)}); check the run folder")


def _broken(path: Path, number: int) -> UserError:
    return UserError(f"{path}:{number}: not a JSON object with a step; repair this line, or move it to another file")
