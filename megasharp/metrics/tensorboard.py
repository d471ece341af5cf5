"""TensorBoard's event files: written a row at a time, and truncated where a resumed run continues.

An event file is a TFRecord file, whose records hold: length (8 bytes, little-endian), its CRC (4), that many bytes,
their CRC (4). Steps only grow within a file, so all that is later than a step is at the file's end.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

_FRAME = struct.Struct("<QI")
_CRC_BYTES = 4


class TensorBoard:
    """Writes rows to event files in `folder`; with `resumed_step` k, earlier files are truncated after step k first.

    Raises OSError where the folder cannot be written.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        if resumed_step is not None:
            for path in folder.glob("events.out.tfevents.*"):
                _truncate(path, resumed_step)
        self._writer = EventFileWriter(str(folder))
        if resumed_step is not None:
            # An open TensorBoard shows the rows that it has read until an event of this kind discards them.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row and hand it to the operating system."""
        # One event a row: an event each, with its checksum in Python, would cost a tenth of a millisecond a metric.
        row = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=row))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _truncate(path: Path, last: int) -> None:
    """Truncate an event file after step `last` or before a torn record; remove it where no row is left."""
    size, keep, rows = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            length = _FRAME.unpack(head)[0]
            end = keep + _FRAME.size + length + _CRC_BYTES
            if end > size:
                break
            event = Event.FromString(file.read(length))
            # A resume's start event names the next step, yet an evaluation of the step before may follow it.
            if event.step > last and event.HasField("summary"):
                break
            file.seek(end)
            keep = end
            rows += event.HasField("summary")
    if not rows:
        path.unlink()
    elif keep < size:
        with path.open("r+b") as file:
            file.truncate(keep)
