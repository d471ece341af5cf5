"""A job to Slurm: its file beside the run's logs, then sbatch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from megasharp.errors import UserError
from megasharp.files import write_text
from megasharp.jobs.job import Job, render

LIMIT_S = 120


def submit(job: Job) -> tuple[str, Path]:
    """Give a job to sbatch; returns its number and its log.

    Raises UserError where there is no sbatch, and in sbatch's own words when it refuses.
    """
    text = render(job)
    sbatch_program()
    logs = job.run / "logs"
    file = logs / f"{job.name}.sbatch"
    write_text(file, text)
    number = sbatch(file)
    return number, logs / f"slurm_{number}.log"


def sbatch_program() -> str:
    """Where sbatch is. Raises UserError where it is not."""
    program = shutil.which("sbatch")
    if program is None:
        raise UserError("sbatch is not on this machine: submit from a login node, or print the file with --dry-run")
    return program


def sbatch(file: Path) -> str:
    """Submit a file; returns the job's number. Raises UserError as `submit` does."""
    try:
        done = subprocess.run(
            [sbatch_program(), "--parsable", str(file)], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch did not answer in {LIMIT_S} s; look with squeue before you submit again") from None
    if done.returncode:
        words = " ".join(done.stderr.split())
        raise UserError(f"sbatch refused {file}: {words.removeprefix('sbatch: error: ')}")
    # On a federation "number;cluster" is printed.
    return done.stdout.strip().partition(";")[0]
