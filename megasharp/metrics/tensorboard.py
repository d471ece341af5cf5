"""The event files of TensorBoard: written a row at a time, and cut where a resumed run begins.

An event file is a TFRecord file, records of: length (8 bytes, little-endian), its CRC (4), that many bytes, their CRC
(4). Steps only grow within a file, so whatever lies beyond a step is a file's end.
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
    """Writes rows to event files in `folder`; with `resumed_step` k, what earlier ones hold beyond k goes away first.

    Raises OSError where the folder cannot be written.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        if resumed_step is not None:
            for path in folder.glob("events.out.tfevents.*"):
                _cut(path, resumed_step)
        self._writer = EventFileWriter(str(folder))
        if resumed_step is not None:
            # A TensorBoard that is open shows what it has read until a start tells it otherwise.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row and hand it to the operating system."""
        # One event a row: an event each, with its checksum in Python, would cost a tenth of a millisecond a figure.
        row = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=row))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _cut(path: Path, last: int) -> None:
    """End an event file after step `last`, and before a record that is torn; remove it where no row is left."""
    size, keep, rows = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            length = _FRAME.unpack(head)[0]
            end = keep + _FRAME.size + length + _CRC_BYTES
            if end > size:
                break
            event = Event.FromString(file.read(length))
            # The start of a resume names the step after it, and an evaluation made up for comes behind it.
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
