"""Weights & Biases: the key and the mode are the library's own (`wandb login`, WANDB_API_KEY, WANDB_MODE)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import wandb

from megasharp.metrics.trackers.follow import Described, Row


class WandbRun:
    """A run of the project `entity/project`, or `project` of the key's own entity."""

    def __init__(self, described: Described, known: str | None) -> None:
        self.id = known or secrets.token_hex(4)
        entity, _, project = described.project.rpartition("/")
        self._run = wandb.init(
            entity=entity or None,
            project=project,
            name=described.name,
            id=self.id,
            resume="allow",
            dir=described.folder,
            config=described.config if known is None else None,
            # This is not the training process: its output, machine statistics and code would mislead.
            settings=wandb.Settings(
                console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True
            ),
        )

    def log(self, rows: Sequence[Row]) -> None:
        """Send rows; those of one step become one row in W&B."""
        for row in rows:
            self._run.log(row.values, step=row.step)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()
