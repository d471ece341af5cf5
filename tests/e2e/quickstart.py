"""Short real runs of the quickstart: the same command, the same base, fewer steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nursery import Nursery
from waiting import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = "examples/quickstart/run.yaml"
SMALL = (
    "data.prompts_per_step=8",
    "eval.suites=[]",
    "eval.every=0",
    "log.tensorboard=false",
)


class Command:
    """Runs `megasharp` in processes of its own, from the repository, with run folders below one folder."""

    def __init__(self, runs: Path, nursery: Nursery) -> None:
        self.runs = runs
        self._nursery = nursery

    def start(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "megasharp.cli"),
    ) -> subprocess.Popen[str]:
        """Start without waiting, in a session of its own; both streams are captured.

        `program` is what Python is told to run.
        """
        return subprocess.Popen(
            [sys.executable, *program, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(self, *arguments: str) -> list[str]:
        """The arguments of a training command."""
        return ["train", QUICKSTART, "--runs", str(self.runs), *SMALL, *arguments]

    def run(
        self,
        *arguments: str,
        code: int = 0,
        meanwhile: Callable[[int], object] | None = None,
        umask: int = 0o022,
        folder: Path = REPOSITORY,
        timeout_s: float = HANG_S,
    ) -> str:
        """Run to the end in `folder`; returns standard output, or standard error where `code` is not 0.

        `meanwhile` is called with the command's process id while it runs.
        """
        with tempfile.TemporaryDirectory(prefix="streams-") as temporary:
            streams = [Path(temporary) / name for name in ("out", "error")]
            ended = self._nursery.run(
                arguments, folder, *streams, timeout_s=timeout_s, meanwhile=meanwhile, umask=umask
            )
            out, error = [path.read_text() for path in streams]
        assert ended == code, f"exit {ended}, expected {code}\n{out}\n{error}"
        return error if code else out

    def rows(self, name: str) -> list[dict[str, float]]:
        """metrics.jsonl of a run, training rows only."""
        lines = (self.runs / name / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "policy/loss" in row]
