"""Many jobs as one Slurm array: each of its jobs is one run's own sbatch file, chosen by its number."""

from __future__ import annotations

import getpass
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from megasharp.cluster.slurm.job import LIMIT_S, Job, render, sbatch, sbatch_program
from megasharp.common.errors import UserError
from megasharp.common.files import write_text

# What is each run's own matter in its file, and the array's in an array: `singleton` would let one run at a time.
_OWN = ("--job-name=", "--output=", "--dependency=", "--chdir=")
_SINGLETON = "singleton"


def render_array(name: str, jobs: Mapping[int, Job], folder: Path, at_once: int | None) -> str:
    """The array's sbatch file; `jobs` by number are those that are to run, their files lie in `folder`/jobs.

    Raises UserError as `render` does, and where two runs ask Slurm for different things: an array has one set of them.
    """
    first, *others = jobs.values()
    for job in others:
        if _asked(job) != _asked(first):
            raise UserError(
                f"{name}: runs {first.name} and {job.name} ask Slurm for different things ({_difference(first, job)}); "
                "a Slurm array has one: make sweeps of their own of them"
            )
    numbers = ",".join(map(str, jobs)) + (f"%{at_once}" if at_once else "")
    waits = _dependency(first)
    lines = [
        "#!/bin/bash",
        f"# megasharp sweep: {name}, a run a job. Rendered; each run's own file is jobs/N.sbatch.",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --array={numbers}",
        *_asked(first),
        *([f"#SBATCH --dependency={waits}"] if waits else []),
        f"#SBATCH --output={folder}/logs/%A_%a.log",
        f"#SBATCH --chdir={first.folder}",
        # In this shell's place: Slurm's early signal is the file's to hear.
        f'exec bash {shlex.quote(str(folder / "jobs"))}/"$SLURM_ARRAY_TASK_ID".sbatch',
    ]
    return "\n".join(lines) + "\n"


def submit_array(name: str, jobs: Mapping[int, Job], folder: Path, at_once: int | None) -> str:
    """Write the files below `folder` and give the array to sbatch; returns its number.

    Raises UserError where there is no sbatch, when it refuses, and while an array of this name is queued or running.
    """
    text = render_array(name, jobs, folder, at_once)
    sbatch_program()
    _refuse_twice(name)
    for number, job in jobs.items():
        (job.run / "logs").mkdir(parents=True, exist_ok=True)
        write_text(folder / "jobs" / f"{number}.sbatch", render(job))
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    file = folder / "array.sbatch"
    write_text(file, text)
    return sbatch(file)


def _asked(job: Job) -> list[str]:
    """The lines that ask Slurm for something, but for those that are a run's own."""
    lines = [line for line in render(job).split("\n") if line.startswith("#SBATCH ")]
    return [line for line in lines if not line.removeprefix("#SBATCH ").startswith(_OWN)]


def _difference(one: Job, other: Job) -> str:
    here, there = (set(_asked(job)) for job in (one, other))
    return ", ".join(sorted(line.removeprefix("#SBATCH ") for line in here ^ there))


def _dependency(job: Job) -> str:
    """What the user lets the job wait for."""
    (line,) = (line for line in render(job).split("\n") if line.startswith("#SBATCH --dependency="))
    parts = line.partition("--dependency=")[2].split(",")
    return ",".join(part for part in parts if part != _SINGLETON)


def _refuse_twice(name: str) -> None:
    squeue = shutil.which("squeue")
    if squeue is None:
        return
    command = [squeue, "--noheader", f"--name={name}", f"--user={getpass.getuser()}", "--format=%A"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"squeue did not answer in {LIMIT_S} s; try again when Slurm does") from None
    numbers = sorted(set(done.stdout.split()))
    if numbers:
        raise UserError(
            f"{name}: jobs of it are queued or running ({', '.join(numbers[:3])}), and a run in two jobs would fail; "
            "wait for them, or scancel them: their runs go on where they stopped"
        )
