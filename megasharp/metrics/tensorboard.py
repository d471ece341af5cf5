"""TensorBoard's event files: written a row at a time, and cut where a resumed run continues.

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

from megasharp.common.files import cut_off, set_aside, settle_cuts

_FRAME = struct.Struct("<QI")
_CRC_BYTES = 4


class TensorBoard:
    """Writes rows to event files in `folder`.

    With `resumed_step` k, rows of later steps move first, to event files of the same names below `superseded`.
    Raises OSError where the folder cannot be written.
    """

    def __init__(self, folder: Path, resumed_step: int | None, superseded: Path | None = None) -> None:
        if resumed_step is not None:
            assert superseded is not None, "rows move there"
            for path in folder.glob("events.out.tfevents.*"):
                settle_cuts(path, superseded.parent.glob(f"*/{folder.name}"))
                _cut(path, resumed_step, superseded / folder.name / path.name)
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


def _cut(path: Path, last: int, target: Path) -> None:
    """Move to `target` what an event file holds after step `last`, or after a record that is torn or damaged."""
    size, keep, rows, version = path.stat().st_size, 0, 0, b""
    with path.open("rb") as file:
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            length = _FRAME.unpack(head)[0]
            end = keep + _FRAME.size + length + _CRC_BYTES
            if end > size:
                break
            content = file.read(length)
            try:
                event = Event.FromString(content)
            except Exception:  # protobuf raises an error of its own for damage
                break
            # A resume's start event names the next step, yet an evaluation of the step before may follow it.
            if event.step > last and event.HasField("summary"):
                break
            # An event file begins with a record of its version.
            version = version or head + content + file.read(_CRC_BYTES)
            file.seek(end)
            keep = end
            rows += event.HasField("summary")
    if keep == size and not rows:
        path.unlink()
    elif keep < size and rows:
        cut_off(path, keep, target, version)
    elif keep < size:
        set_aside(path, target)
