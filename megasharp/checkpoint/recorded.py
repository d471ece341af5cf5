"""Reads what was done from a run's folder, and refuses to begin again where the checkpoints of that are missing.

Beginning again is right where nothing but a beginning is lost: where the attempts' records say that none of them
completed a checkpoint. Anything else that bears a step's number stands against it, because checkpoints may lie on
another file system that is not mounted, or in a folder that is purged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from megasharp.checkpoint.attempts import AttemptRecord, read_attempts
from megasharp.checkpoint.manifest import MANIFEST
from megasharp.common.errors import UserError
from megasharp.config.core import read_tree
from megasharp.metrics.writers import METRICS_FILE, read_metrics, rows_from_end

CHECKPOINTS, CONFIG_FILE, LATEST = "checkpoints", "config.yaml", "latest"
# Folders of tables, of which each step has one.
TABLES = ("rollouts", "rollout_tokens", "probe")
_STEP = re.compile(r"(?:damaged_)?step_(\d+)")


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of complete checkpoints in a run's `checkpoints/`, oldest first."""
    names = (path.parent.name.removeprefix("step_") for path in folder.glob(f"step_*/{MANIFEST}"))
    # A copy that someone made beside it has another kind of name.
    return sorted(int(name) for name in names if name.isdecimal())


def of_later_steps(root: Path, after: int) -> list[Path]:
    """Return the evaluations, probes and tables of responses of steps above `after`."""
    paths = (path for name in ("evals", *TABLES) for path in root.glob(f"{name}/step_*"))
    return [path for path in paths if _step(path) > after]


def has_begun(root: Path) -> bool:
    """Return whether a training step was recorded there: before that there is nothing to continue."""
    if not root.is_dir():
        return False
    return bool(complete_steps(root / CHECKPOINTS)) or any(_signs(root, read_attempts(root / "logs")))


def check_checkpoints(root: Path) -> str | None:
    """Return a line for the user where a run begins again because it never came to a checkpoint; None else.

    Raises UserError where steps were recorded and the checkpoint to continue from is missing.
    """
    place = root / CHECKPOINTS
    if complete_steps(place):
        return None
    attempts = read_attempts(root / "logs")
    signs = [*_signs(root, attempts)]
    missing = _missing(place)
    if not signs and (missing is None or not place.is_symlink()):
        return None
    nothing_lost = missing is None and not any(_signs_of_saves(place)) and bool(attempts)
    if nothing_lost and all(_saved_nothing(root, number, record) for number, record in attempts.items()):
        return f"no checkpoint was complete yet, so the run begins again at step 1 ({signs[0]})"
    raise UserError(
        f"{root}: {'; '.join(signs) or 'the run was begun'}; but {missing or f'{place} holds no complete checkpoint'}; "
        "bring the checkpoints back (mount or copy them), or begin anew with --start-over, which moves the folder aside"
    )


def _signs(root: Path, attempts: Mapping[int, AttemptRecord | None]) -> Iterator[str]:
    """Yield each thing that says that steps were done."""
    _, row = next(rows_from_end(root), (0, {"step": 0}))
    if (row["step"] or 0) > 0:
        yield f"{METRICS_FILE} has rows up to step {row['step']}"
    for name in ("evals", *TABLES):
        newest = max(map(_step, root.glob(f"{name}/step_*")), default=0)
        if newest > 0:
            yield f"{name}/ has step {newest}"
    yield from _signs_of_saves(root / CHECKPOINTS)
    done = {
        number: max(record.from_step, record.saved_step or 0, record.last_step or 0)
        for number, record in attempts.items()
        if record is not None
    }
    if any(done.values()):
        number = max(done, key=lambda number: done[number])
        yield f"attempt {number} came to step {done[number]}"


def _signs_of_saves(place: Path) -> Iterator[str]:
    """Yield each thing in a run's `checkpoints/` that says that one was complete, or is no more."""
    with suppress(OSError, ValueError):
        yield f"{place.name}/{LATEST} names {(place / LATEST).read_text(encoding='utf-8').strip()}"
    for path in place.glob("*step_*"):
        if _step(path) > 0:
            yield f"{place.name}/ has {path.name}"


def _missing(place: Path) -> str | None:
    """Return the words for a folder that is not there; None where it is."""
    if place.is_dir():
        return None
    if place.is_symlink():
        return f"{place} is a link to {place.readlink()}, which is not there"
    return f"{place} is no folder" if place.exists() else f"{place} is not there"


def _saved_nothing(root: Path, number: int, record: AttemptRecord | None) -> bool:
    """Return whether an attempt is known to have completed no checkpoint and to have continued from none."""
    if record is None:
        # Killed before its record was written: its folder then holds its configuration at most.
        left = (path.name for path in (root / "logs" / f"attempt_{number}").iterdir())
        return all(name == CONFIG_FILE or name.endswith(".partial") for name in left)
    if record.saved_step is not None:
        return record.saved_step == 0 and record.from_step == 0
    # Of before 2026-11-24. A save left a row of its own, and was due at `checkpoint.every` at the latest.
    settings = read_tree(root / CONFIG_FILE).get("checkpoint")
    every = settings.get("every") if isinstance(settings, dict) else None
    rows = read_metrics(root)
    done = max((row["step"] or 0 for row in rows), default=0)
    saved = any("time/checkpoint" in row for row in rows)
    return record.from_step == 0 and isinstance(every, int) and max(done, record.last_step or 0) < every and not saved


def _step(path: Path) -> int:
    """Return the step in the name of a file or folder; -1 where it is not one of ours."""
    found = _STEP.match(path.name)
    return int(found[1]) if found else -1
