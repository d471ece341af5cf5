"""The outputs of a run besides metrics.jsonl, and how long its tables of responses stay; read back without torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from megasharp.common.files import Readers
from megasharp.common.section import Section


class RolloutTablesConfig(Section):
    """Retention of the tables of responses, which are most of what a long run leaves besides checkpoints.

    512 responses of 8,192 tokens are a table of 5 to 8 MB: the defaults keep 7 to 12 GB of a run of 5,000 such steps,
    and all of a run of up to 1,000.
    """

    keep_last: int | None = Field(
        default=1000,
        ge=1,
        description="Number of newest steps whose tables of responses stay on disk. Lower it to save disk space. "
        "null: all stay.",
    )
    every: int | None = Field(
        default=10,
        ge=1,
        description="Of older steps, keeps the tables of those that are a multiple of this number. null: none of them.",
    )
    tokens: int = Field(
        default=65536,
        ge=0,
        description="Largest number of response tokens per step whose own texts and log-probs are written, to "
        "rollout_tokens/step_N.parquet; whole groups are chosen by a hash of their prompt. 0: none.",
    )
    tokens_keep_last: int | None = Field(
        default=None,
        ge=1,
        description="Number of newest steps whose tokens stay on disk. Set it where tokens is large: a token takes 4 "
        "bytes, which is more than the text of its response. null: as long as the step's table of responses.",
    )

    def keeps(self, step: int, newest: int) -> bool:
        """Return whether the responses of `step` stay once those of step `newest` are written."""
        recent = self.keep_last is None or step > newest - self.keep_last
        return recent or (self.every is not None and step % self.every == 0)

    def keeps_tokens(self, step: int, newest: int) -> bool:
        """Return whether the tokens of `step` stay once those of step `newest` are written."""
        recent = self.tokens_keep_last is None or step > newest - self.tokens_keep_last
        return recent and self.keeps(step, newest)


class LogConfig(Section):
    """Outputs besides metrics.jsonl: TensorBoard, trackers, and the table of responses of each step.

    `wandb` is a project (or entity/project), `mlflow` an experiment; their libraries read keys and servers from their
    own environment variables.
    """

    tensorboard: bool = Field(
        default=True,
        description="Writes metrics to the run's tensorboard folder, besides metrics.jsonl.",
    )
    candidates: int = Field(
        default=3,
        ge=1,
        le=8,
        description="Number of most probable tokens whose mean log-probs are logged as candidates/lambda_1 and so on, "
        "as in CaSP's figures.",
    )
    wandb: str | None = Field(
        default=None,
        description="Project, or entity/project, in Weights & Biases to send metrics and configuration to. Keys and "
        "servers come from wandb's own environment variables. null: off.",
    )
    mlflow: str | None = Field(
        default=None,
        description="Experiment in MLflow to send metrics and configuration to. The server comes from MLflow's own "
        "environment variables. null: off.",
    )
    rollouts: RolloutTablesConfig | None = Field(
        default=RolloutTablesConfig(),
        description="Writes every training response to rollouts/step_N.parquet; its keys say which tables stay on "
        "disk. null: no tables.",
    )
    readable_by: Readers = Field(
        default="owner",
        description="Readers of the run's folder, with its logs, responses and weights: owner (modes 0700 and 0600) or "
        "group (0750 and 0640, of the folder's group). Set group where others of a team read the run.",
    )

    keep_superseded: int | None = Field(
        default=None,
        ge=0,
        description="Number of attempts, the newest, whose folders in superseded/ stay when a run is resumed. They "
        "hold rows, tables and evaluations of steps that the attempt trained again. Set it where a run restarts so "
        "often that they fill the disk. null: all stay.",
    )

    @model_validator(mode="before")
    @classmethod
    def _older_forms(cls, tree: Any) -> Any:
        """Translate what older files say: `rollouts: true` (all tables stay) or `false`, and `rollout_tokens: N`."""
        if not isinstance(tree, dict) or not ("rollout_tokens" in tree or isinstance(tree.get("rollouts"), bool)):
            return tree
        rest = {key: value for key, value in tree.items() if key != "rollout_tokens"}
        given = rest.get("rollouts", {})
        tables = {"keep_last": None} if given is True else None if given is False else given
        if "rollout_tokens" in tree and isinstance(tables, dict):
            if "tokens" in tables:
                raise ValueError("rollout_tokens is the older name of rollouts.tokens; give one of them")
            tables = {**tables, "tokens": tree["rollout_tokens"]}
        return {**rest, "rollouts": tables}

    @property
    def trackers(self) -> dict[str, str]:
        """Project or experiment for each tracker that is on, by the name of its library."""
        asked = {"wandb": self.wandb, "mlflow": self.mlflow}
        return {name: project for name, project in asked.items() if project is not None}
