"""`megasharp submit` to the tests' Slurm, as a user would call it, from a folder of its own."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cluster import Cluster, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = str(REPOSITORY / "examples" / "quickstart" / "run.yaml")
STANDIN = str(Path(__file__).with_name("standin_python"))


@dataclass
class Submitting:
    """Submits runs that lie below `folder`/runs."""

    slurm: Cluster
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __call__(self, name: str, *arguments: str, file: str = QUICKSTART, **variables: str) -> str:
        """Submit; returns the job's number."""
        out = self.slurm.call(
            *(sys.executable, "-P", "-m", "megasharp.cli", "submit", file, f"name={name}", "--cpus-per-node", "1"),
            *arguments,
            environment={
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
                "REAL_PYTHON": sys.executable,
                "STANDIN_NAME": name,
                **variables,
            },
            cwd=self.folder,
        )
        found = re.match(r"submitted job (\d+)", out)
        assert found, out
        return found[1]

    def standin(self, name: str, mode: str, *arguments: str) -> str:
        """Submit the stand-in for a run; 600 s of lead time are never reached."""
        return self(name, "--python", STANDIN, *arguments, STANDIN=mode)

    def log(self, name: str, job: str) -> str:
        """What the job's own script said."""
        path = self.folder / "runs" / name / "logs" / f"slurm_{job}.log"
        return path.read_text() if path.exists() else ""

    def node(self, name: str, job: str, restart: int, node: int = 0) -> str:
        """What an attempt's node said."""
        path = self.folder / f"runs/{name}/logs/slurm_{job}/restart_{restart}/node_{node}.log"
        return path.read_text() if path.exists() else ""

    def warn(self, name: str, job: str, restart: int, when: str = "") -> None:
        """Send USR1 as Slurm does, to the job's shell, once the attempt's node 0 has said `when`."""
        wait_for(lambda: when in self.node(name, job, restart), 60, lambda: self.log(name, job))
        assert os.environ.get("SLURM_CONF") is None, "the tests are to speak to their own Slurm"
        self.slurm.call("scancel", "--batch", "--signal=USR1", job)
