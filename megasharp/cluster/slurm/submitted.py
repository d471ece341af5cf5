"""The jobs that were submitted for a run, `logs/submitted.jsonl` in its folder, and where they stand.

Before its first attempt a run has nothing else by which it could be found. Imports the standard library alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

SUBMITTED = Path("logs", "submitted.jsonl")
# Of a run that was submitted often, only the last jobs can still be queued.
_LAST = 5
_LIMIT_S = 5.0
# A line that `job.sbatch` itself writes; others come from Slurm and srun.
_OWN_LINE = re.compile(r"^\S+ job \d+, restart \d+: (.*)$", re.MULTILINE)
_LOG_END_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that was submitted at `time` (seconds since 1970): its number ("7", of an array "7_2") and its log."""

    job: str
    time: float
    log: str


@dataclass(frozen=True, slots=True)
class Standing:
    """A job in Slurm's queue: its state and the reason for it, as squeue writes them: PENDING, Resources.

    `started`: when it was started the last time, in seconds since 1970; None where it was not, or that is unknown.
    """

    state: str
    reason: str
    started: float | None = None


# The jobs in Slurm's queue among these, by number; None where Slurm is not at hand.
Queue = Callable[[Sequence[str]], Mapping[str, Standing] | None]


def record(run: Path, job: str, log: Path) -> None:
    """Add a job to those of a run's folder, whose `logs` is there."""
    with (run / SUBMITTED).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(Submitted(job, time.time(), str(log)))) + "\n")


def submitted_jobs(run: Path) -> list[Submitted]:
    """Return a run's last jobs, oldest first; a line that cannot be read is left out."""
    try:
        lines = (run / SUBMITTED).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in lines[-_LAST:]:
        try:
            found.append(Submitted(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def queue(jobs: Sequence[str]) -> Mapping[str, Standing] | None:
    """Ask squeue about all of them at once."""
    program = shutil.which("squeue")
    if program is None:
        return None
    command = [program, "--noheader", "--array", f"--jobs={','.join(jobs)}", "--format=%i|%T|%S|%r"]
    # Another format of the user's would be no time to read.
    environment = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # So it says of a single job that it has forgotten; of several it lists those that it knows.
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    rows = (line.strip().split("|", 3) for line in done.stdout.splitlines())
    found: dict[str, Standing] = {}
    for job, state, start, reason in (row for row in rows if len(row) == 4):
        found[job] = Standing(state, reason)
        # It is "N/A" of a job that was not started.
        with suppress(ValueError):
            found[job] = Standing(state, reason, datetime.fromisoformat(start).timestamp())
    return found


def standings(runs: Mapping[Path, float], ask: Queue = queue) -> dict[Path, str]:
    """Say of each run that no process trains where its jobs stand; nothing of one that is over.

    `runs` gives the folders, and when the last attempt of each began (0.0: none has), in seconds since 1970.
    """
    jobs = {run: found for run in runs if (found := submitted_jobs(run))}
    if not jobs:
        return {}
    queued = ask([each.job for found in jobs.values() for each in found])
    said = {run: _standing(found, runs[run], queued) for run, found in jobs.items()}
    return {run: words for run, words in said.items() if words}


def _standing(jobs: Sequence[Submitted], began: float, queued: Mapping[str, Standing] | None) -> str:
    last = jobs[-1]
    for each in jobs if queued is not None else ():
        found = queued.get(each.job) if queued is not None else None
        if found is not None and found.state == "PENDING":
            return f"queued (job {each.job}, {found.state}: {found.reason})"
        if found is not None:
            # Of a job that was queued again, an attempt of an earlier start says nothing.
            over = began > (each.time if found.started is None else found.started)
            return f"{'saving or ending' if over else 'starting'} (job {each.job}, {found.state})"
    if began > last.time:
        return _given_up(last)
    if queued is None:
        return f"submitted as job {last.job}"
    if Path(last.log).is_file():
        return f"job {last.job} ended before the run began: see {last.log}"
    return f"job {last.job} left the queue before it began, as after scancel: submit again"


def _given_up(job: Submitted) -> str:
    """Say why a job does not queue itself again, as the last of its own lines in its log has it; empty elsewhere."""
    try:
        with Path(job.log).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_END_BYTES))
            end = file.read().decode(errors="replace")
    except OSError:
        return ""
    own = _OWN_LINE.findall(end)
    return f"job {job.job} {own[-1]}" if own and own[-1].startswith("gave up: ") else ""
