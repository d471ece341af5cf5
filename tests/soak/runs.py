"""The two runs of the soak, started, tended and ended: over SGLang engines under Ray, and as a job of two slurmd."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))

from cluster import Cluster
from submitting import QUICKSTART, REPOSITORY, Submitting

from tests.soak import checks

SEED = 1
# Common to both; the watchdogs' limits are short, so that they are seen to act.
_COMMON = (
    "guard.stage_timeout_s=80",
    "guard.long_stages={start: 300, rollout: 120, eval: 300, checkpoint: 120}",
    "log.wandb=soak",
    # Beyond 1,000 steps tables would go by which prompts are counted at the end.
    "log.rollouts.keep_last=null",
    "reward.workers=1",
)
FLEET_OPTIONS = (
    "deterministic=false",
    "rollout.max_staleness=2",
    "rollout.oversample=0.75",
    "rollout.restarts=100",
    "data.prompts_per_step=4",
    "checkpoint.every=5",
    "eval={at_start: false, with_memory: false, n: 8, k: [1, 2, 4, 8]}",
)
SLURM_OPTIONS = (
    "deterministic=true",
    "cluster.backend=ray",
    "cluster.nodes=2",
    "policy.dp=2",
    "data.prompts_per_step=8",
    "checkpoint.every=20",
    "eval={every: 0, suites: []}",
)


class SoakRun(Protocol):
    """A run under way. `root` is its folder, `file` and `options` are what it was started with."""

    root: Path
    options: tuple[str, ...]
    file: str

    def tend(self) -> bool:
        """Return False once the run is done; start it again where it ended before, as its user would."""
        ...

    def by_hand(self) -> list[str]:
        """Return the last line of each end after which it was started by hand."""
        ...

    def close(self) -> None: ...


class FleetRun:
    """`megasharp train --retries` on examples/fleet_on_cpu: tp 2, two SGLang engines, Ray, DLC, partial rollouts."""

    name = "fleet_on_cpu"
    file = "examples/fleet_on_cpu/run.yaml"
    retries = 100

    def __init__(self, disk: Path, logs: Path, steps: int, environment: Mapping[str, str]) -> None:
        self.root = disk / "runs" / self.name
        self.options: tuple[str, ...] = (f"steps={steps}", *_COMMON, *FLEET_OPTIONS)
        self._log = logs / "console.log"
        self._environment = {**os.environ, **environment}
        self._ends: list[str] = []
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "megasharp.cli", "train", self.file, *self.options]
        command += ["--runs", str(self.root.parent), "--retries", str(self.retries)]
        again = ["--resume"] if self._ends else []
        with self._log.open("ab") as log:
            return subprocess.Popen([*command, *again], cwd=REPOSITORY, env=self._environment, stdout=log, stderr=log)

    def tend(self) -> bool:
        code = self._process.poll()
        if code is None:
            return True
        if code == 0:
            return False
        self._ends.append(f"exit code {code}: {_last_line(self._log)}")
        self._process = self._start()
        return True

    def by_hand(self) -> list[str]:
        return self._ends

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class SlurmRun:
    """`megasharp submit` of the quickstart to a Slurm of two nodes: dp 2 over Ray, bit for bit the same each time."""

    name = "soak"
    file = QUICKSTART

    def __init__(self, disk: Path, logs: Path, steps: int, environment: Mapping[str, str]) -> None:
        self.root = disk / "runs" / self.name
        self.options: tuple[str, ...] = (f"steps={steps}", *_COMMON, *SLURM_OPTIONS)
        self._logs = logs
        self._environment = {**environment, "MEGASHARP_INTERFACE": "lo", "MEGASHARP_JOIN_SECONDS": "400"}
        self._cluster = Cluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")), nodes=2)
        self._submitting = Submitting(self._cluster, disk)
        self._ends: list[str] = []
        self._job = self._submit()

    def _submit(self) -> str:
        limits = ("--time", "4:00:00", "--retries", "100", "--restarts", "100")
        return self._submitting(self.name, *self.options, *limits, file=self.file, **self._environment)

    def tend(self) -> bool:
        state = self._cluster.show(self._job)
        if state["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING"):
            return True
        if (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"):
            return False
        said = checks.told_at_the_end(self._submitting.log(self.name, self._job))
        self._ends.append(f"job {state['JobState']}: {said}")
        self._job = self._submit()
        return True

    def by_hand(self) -> list[str]:
        return self._ends

    def close(self) -> None:
        for path in sorted((self.root / "logs").glob("slurm_*.log")):
            with suppress(OSError):
                (self._logs / path.name).write_bytes(path.read_bytes())
        self._cluster.close()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
