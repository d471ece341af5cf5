"""The process of one tracker: `python -m megasharp.metrics.trackers.follow TRACKER PROJECT RUN_FOLDER`.

It sends the rows of metrics.jsonl until its standard input ends, which happens with the run, even if the run is killed;
then it has `LIMIT_S` seconds for the rest. An error ends it, with one line as the last of its output. A tracker's
library is behind two protocols: `Open` creates or continues a run there, `Sink` takes its rows.
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
    """Metrics of one step that a tracker has not received yet; `time` in seconds since 1970."""

    step: int
    time: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Described:
    """A run as it is described to a tracker once: the project it belongs to, its name, and its configuration.

    `folder` is for files that the tracker's library wants to write.
    """

    project: str
    name: str
    folder: Path
    config: Tree


class Sink(Protocol):
    """A run in a tracker."""

    @property
    def id(self) -> str:
        """The run's id in the tracker."""
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Send rows, in the order of their steps. May raise anything."""
        ...

    def close(self) -> None:
        """Send the rest; the run may be continued later."""
        ...


class Open(Protocol):
    """Creates the run in a tracker, with its configuration, or continues the one whose id is `known`."""

    def __call__(self, described: Described, known: str | None) -> Sink: ...


LIMIT_S = 60
_POLL_S = 1.0
_ROWS_AT_ONCE = 200
_OPENERS = {"wandb": "to_wandb.WandbRun", "mlflow": "to_mlflow.MlflowRun"}


class Follower:
    """Sends to `sink` the values that `record` lacks. A curve only goes forward: no step of it is sent twice."""

    def __init__(self, metrics: Path, record: Record, path: Path, sink: Sink) -> None:
        self._file = metrics.open("rb")
        self._record = record
        self._path = path
        self._sink = sink
        self._torn = b""

    def follow(self) -> None:
        """Send all whole lines that are there now."""
        while lines := self._file.readlines(1 << 20):
            # The run may be in the middle of a line: its beginning waits for the rest.
            lines[0] = self._torn + lines[0]
            self._torn = b"" if lines[-1].endswith(b"\n") else lines.pop()
            rows = [row for line in lines if (row := self._new(line)) is not None]
            for begin in range(0, len(rows), _ROWS_AT_ONCE):
                batch = rows[begin : begin + _ROWS_AT_ONCE]
                self._sink.log(batch)
                # Recorded after they have arrived: rows that are sent twice do less harm than missing ones.
                sent = {name: row.step for row in batch for name in row.values}
                self._record = self._record.model_copy(update={"sent": {**self._record.sent, **sent}})
                write_text(self._path, self._record.model_dump_json())

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


def main(tracker: str, project: str, root: Path, ends: TextIO) -> None:
    """Follow the run in `root` until the stream `ends` is at its end."""
    folder = root / "trackers"
    folder.mkdir(exist_ok=True)
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ends, over), daemon=True).start()
    with (folder / f".{tracker}.lock").open("w") as lock:
        # The process of the previous attempt may still be sending.
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = record_path(root, tracker)
        record = Record.model_validate_json(path.read_text(encoding="utf-8")) if path.exists() else None
        text = (root / "config.yaml").read_text(encoding="utf-8")
        described = Described(project, root.name, path.parent, parse_yaml(text, "config.yaml"))
        module, name = _OPENERS[tracker].split(".")
        opener: Open = getattr(import_module(f"megasharp.metrics.trackers.{module}"), name)
        sink = opener(described, record.id if record else None)
        # Written again even if there was a record: the folder may have been moved since.
        sent = record.sent if record else {}
        record = Record(id=sink.id, folder=str(root.resolve()), inode=root.stat().st_ino, sent=sent)
        write_text(path, record.model_dump_json())
        follower = Follower(root / METRICS_FILE, record, path, sink)
        while not over.wait(_POLL_S):
            follower.follow()
        follower.follow()
        sink.close()


def _wait_for_end(ends: TextIO, over: threading.Event) -> None:
    ends.read()
    # The kernel ends this process in time, also where the library does not return.
    signal.alarm(LIMIT_S)
    over.set()


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.stdin)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {one_line(error)}")
