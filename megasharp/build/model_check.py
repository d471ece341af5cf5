"""The real Megatron model of every pipeline stage, built without memory in a process beside `megasharp plan`.

Imports next to nothing, so that the process, which has Megatron to import, starts before anything else does.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from megasharp.errors import UserError

if TYPE_CHECKING:
    from megasharp.convert.architecture import Architecture
    from megasharp.convert.lora import LoraSettings
    from megasharp.types import ParallelLayout

# Megatron's import is most of it.
_SECONDS = 300


class ModelCheck:
    """Begins with its construction, ends with its block. `ask` once, then `counts` waits for the answer."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "megasharp.mcore.meta_program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        with self._process:
            self._process.kill()

    def ask(self, networks: Sequence[Architecture], layout: ParallelLayout, lora: LoraSettings | None) -> None:
        """Have the parameters of these networks counted; `lora`: adapters of the first."""
        assert self._process.stdin is not None
        # A process that has ended says why in `counts`.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as question:
            pickle.dump((tuple(networks), layout, lora), question)
        self._process.stdin = None

    def counts(self) -> list[list[int]]:
        """Parameters by network and stage. Raises UserError with Megatron's own words where it cannot be built."""
        try:
            out, errors = self._process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"Megatron's model was not built in {_SECONDS} s") from None
        if self._process.returncode:
            last = (errors.decode().strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(f"Megatron cannot build this model in this layout: {last}")
        found: list[list[int]] = json.loads(out.strip().splitlines()[-1])
        return found
