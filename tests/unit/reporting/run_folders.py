"""Run folders written by hand, in every state that a run can be found in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasharp.checkpoint.attempts import ATTEMPT_FILE, AttemptRecord
from megasharp.checkpoint.store import CheckpointStore, RunState
from megasharp.common.control import ControlState
from tests.unit.saving import save_at_once

CONFIG = """name: {name}
steps: {steps}
policy: {{optimizer: {{lr: {lr}}}}}
checkpoint: {{keep_best: eval/dev/pass@1}}
"""


@dataclass(frozen=True)
class Folder:
    """One run's folder; what is not called is not there."""

    root: Path

    def config(self, name: str = "mine", steps: int = 10, lr: float = 0.1) -> Folder:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "config.yaml").write_text(CONFIG.format(name=name, steps=steps, lr=lr))
        return self

    def rows(self, rows: Sequence[Mapping[str, float | None]]) -> Folder:
        lines = [json.dumps({"time": 1000.0 + number, **row}) + "\n" for number, row in enumerate(rows)]
        (self.root / "metrics.jsonl").write_text("".join(lines))
        return self

    def attempt(self, number: int, record: AttemptRecord | None) -> Folder:
        folder = self.root / "logs" / f"attempt_{number}"
        folder.mkdir(parents=True)
        if record is not None:
            (folder / ATTEMPT_FILE).write_text(record.model_dump_json())
        return self

    def checkpoint(self, step: int, control: ControlState | None = None) -> Folder:
        store = CheckpointStore(self.root / "checkpoints", 9, None)
        state = RunState(reference="base", step=step, control=control or ControlState())
        save_at_once(store, state, lambda folder: folder.joinpath("weights").write_bytes(b"x" * 2000) and None)
        return self


def steps(first: int, last: int, seconds: float = 2.0, **figures: float) -> list[dict[str, float | None]]:
    """Rows of training steps."""
    return [
        {"step": step, "time/step": seconds, "time/update": seconds, "reward/mean": step / 100, **figures}
        for step in range(first, last + 1)
    ]
