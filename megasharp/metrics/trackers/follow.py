"""The process of one tracker: `python -m megasharp.metrics.trackers.follow TRACKER PROJECT RUN_FOLDER`.

It sends the rows of metrics.jsonl until its standard input ends, which is when the run does, however it does; then it
has `LIMIT_S` seconds for what is left. An error ends it, with one line as the last of its output.

What the process that follows a run and the tracker's own library have to do with each other.
"""

from __future__ import annotations

import fcntl
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, TextIO

from megasharp.common.errors import one_line
from megasharp.common.files import write_text
from megasharp.config.core import Tree, parse_yaml
from megasharp.metrics.trackers.watch import Record, record_path
from megasharp.metrics.writers import METRICS_FILE, RESERVED, parse_row


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one step that a tracker has not got yet; `time` in seconds since 1970."""

    step: int
    time: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Described:
    """What a tracker is told of a run once: the project it belongs to, its name, and its configuration.

    `folder` is the tracker's own, for files that its library wants to write.
    """

    project: str
    name: str
    folder: Path
    config: Tree


class Sink(Protocol):
    """A run in a tracker."""

    @property
    def id(self) -> str:
        """The run's id there."""
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Send rows, in the order of their steps. May raise anything."""
        ...

    def close(self) -> None:
        """Send what is left; the run may go on later."""
        ...


class Open(Protocol):
    """Makes the run in a tracker, or goes on with the one of this id; only a new one is told the configuration."""

    def __call__(self, described: Described, known: str | None) -> Sink: ...


LIMIT_S = 60
_POLL_S = 1.0
_ROWS_AT_ONCE = 200
_OPENERS = {"wandb": "to_wandb.WandbRun", "mlflow": "to_mlflow.MlflowRun"}


class Follower:
    """Sends to `sink` what `record` says that it has not got. Curves only go forward: steps are never sent again."""

    def __init__(self, metrics: Path, record: Record, path: Path, sink: Sink) -> None:
        self._file = metrics.open("rb")
        self._record = record
        self._path = path
        self._sink = sink
        self._torn = b""

    def follow(self) -> None:
        """Send all whole lines that are there now."""
        while lines := self._file.readlines(1 << 20):
            rows = [row for line in self._whole(lines) if (row := self._new(line)) is not None]
            for begin in range(0, len(rows), _ROWS_AT_ONCE):
                self._send(rows[begin : begin + _ROWS_AT_ONCE])

    def _whole(self, lines: list[bytes]) -> list[bytes]:
        lines = [self._torn + lines[0], *lines[1:]]
        self._torn = b"" if lines[-1].endswith(b"\n") else lines.pop()
        return lines

    def _new(self, line: bytes) -> Row | None:
        row = parse_row(line)
        if row is None:
            return None
        step = int(row["step"] or 0)
        values = {
            name: value
            for name, value in row.items()
            if value is not None and name not in RESERVED and step > self._record.sent.get(name, -1)
        }
        return Row(step, row.get("time") or 0.0, values) if values else None

    def _send(self, rows: Sequence[Row]) -> None:
        self._sink.log(rows)
        sent = {name: row.step for row in rows for name in row.values}
        self._record = self._record.model_copy(update={"sent": {**self._record.sent, **sent}})
        write_text(self._path, self._record.model_dump_json())


def main(tracker: str, project: str, root: Path, ends: TextIO) -> None:
    """Follow the run in `root` until `ends` does."""
    folder = root / "trackers"
    folder.mkdir(exist_ok=True)
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ends, over), daemon=True).start()
    with (folder / f".{tracker}.lock").open("w") as lock:
        # The process of the attempt before may have a last row on its way.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _follow(tracker, project, root, over)


def _wait_for_end(ends: TextIO, over: threading.Event) -> None:
    """Whatever the library is in the middle of then, the kernel ends this process in time."""
    ends.read()
    signal.alarm(LIMIT_S)
    over.set()


def _follow(tracker: str, project: str, root: Path, over: threading.Event) -> None:
    path = record_path(root, tracker)
    record = Record.model_validate_json(path.read_text(encoding="utf-8")) if path.exists() else None
    text = (root / "config.yaml").read_text(encoding="utf-8")
    described = Described(project, root.name, path.parent, parse_yaml(text, "config.yaml"))
    sink = _opener(tracker)(described, record.id if record else None)
    # Also where there was one: the folder may have been moved since.
    sent = record.sent if record else {}
    record = Record(id=sink.id, folder=str(root.resolve()), inode=root.stat().st_ino, sent=sent)
    write_text(path, record.model_dump_json())
    follower = Follower(root / METRICS_FILE, record, path, sink)
    while not over.wait(_POLL_S):
        follower.follow()
    follower.follow()
    sink.close()


def _opener(tracker: str) -> Open:
    module, name = _OPENERS[tracker].split(".")
    opener: Open = getattr(import_module(f"megasharp.metrics.trackers.{module}"), name)
    return opener


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.stdin)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {one_line(error)}")
