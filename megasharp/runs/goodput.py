"""Where a run's wall-clock time went: goodput is the share of it that its history is made of.

    goodput = useful step time / wall time

Useful step time: over the steps of the history, each once, the seconds of the step without evaluations, checkpoints and
start-up, which in older versions' runs the row of the next step contains. A step that was trained again after a restart
counts as it was last; the earlier time is `repeated`, and so are steps that a killed attempt began. Wall time: over all
attempts, from when the process began (its imports and checks are part of its start) to the end; of a killed one to when
it was last seen. Time between attempts (a queue) is nobody's and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megasharp.checkpoint.attempts import AttemptRecord
from megasharp.metrics.writers import Row
from megasharp.runs.history import RunHistory

# Stages of an attempt's clock that are not a step's.
_APART = ("start", "eval", "checkpoint")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Seconds; they add up to `wall`. `estimated`: some attempt has no record, and `wall` is from the rows' times."""

    wall: float
    useful: float
    start: float
    evaluation: float
    checkpoint: float
    repeated: float
    rest: float
    estimated: bool

    @property
    def share(self) -> float | None:
        """Goodput; None before any time has passed."""
        return self.useful / self.wall if self.wall > 0 else None


def goodput(history: RunHistory) -> Goodput:
    """Account for a run's time so far."""
    rows = history.training
    useful = sum(_useful(row) for row in rows)
    known = [record for record in history.attempts.values() if record is not None]
    if not known or len(known) < len(history.attempts):
        return _from_rows(history, useful)
    # Of an attempt that was killed the record can be some seconds older than its last row.
    wall = max(sum(duration(record, history) for record in known), useful)
    start, evaluation, checkpoint = (sum(record.seconds.get(stage, 0.0) for record in known) for stage in _APART)
    in_steps = sum(seconds for record in known for stage, seconds in record.seconds.items() if stage not in _APART)
    left = wall - useful - start - evaluation - checkpoint
    repeated = min(max(in_steps - useful, 0.0), max(left, 0.0))
    return Goodput(wall, useful, start, evaluation, checkpoint, repeated, max(left - repeated, 0.0), False)


def duration(record: AttemptRecord, history: RunHistory) -> float:
    """Seconds of one attempt so far."""
    if record.ended is not None:
        return record.ended - record.started
    newest = list(history.attempts.values())[-1]
    return (history.now if history.alive and record is newest else record.seen) - record.started


def _useful(row: Row) -> float:
    apart = sum(row.get(f"time/{stage}") or 0.0 for stage in _APART)
    return max((row["time/step"] or 0.0) - apart, 0.0)


def _from_rows(history: RunHistory, useful: float) -> Goodput:
    rows = history.training
    if not rows:
        return Goodput(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, True)
    begun = (rows[0]["time"] or 0.0) - (rows[0]["time/step"] or 0.0)
    # What came before the first step's row began is not in the wall time.
    ended = max(row.get("time") or 0.0 for row in history.rows)
    wall = max(ended - begun, useful)
    stages = [seconds for step, seconds in history.stages.items() if step >= (rows[0]["step"] or 0)]
    evaluation, checkpoint = (sum(seconds.get(stage, 0.0) for seconds in stages) for stage in _APART[1:])
    rest = max(wall - useful - evaluation - checkpoint, 0.0)
    return Goodput(wall, useful, 0.0, evaluation, checkpoint, 0.0, rest, True)
