"""Who judges a run's responses: this process, or a pool of worker processes, and what happened in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from megasharp.config.run import RewardConfig
from megasharp.data.tasks import TaskItem
from megasharp.errors import UserError
from megasharp.rewards import VERIFIERS
from megasharp.rewards.judge import DirectJudge, Judge, Verifier
from megasharp.rewards.own import OWN_TASK, OwnReward, find_function
from megasharp.sandbox.pool import PoolCounts, VerifierPool


class Judging:
    """The judge of a run; `close` ends its workers. Their output goes to `log`."""

    def __init__(self, reward: RewardConfig, log: Path | None) -> None:
        self._taken = PoolCounts()
        self._pool: VerifierPool | None = None
        if reward.workers > 0:
            make = partial(all_verifiers, reward.function)
            self._pool = VerifierPool(make, make().keys(), reward.workers, reward.timeout_s, log=log)
        self.judge: Judge = self._pool or DirectJudge(all_verifiers(reward.function))

    def take(self) -> dict[str, float]:
        """What happened to workers since the last call, under the names of the metrics; nothing without a pool."""
        if self._pool is None:
            return {}
        counts = self._pool.counts
        now, before = asdict(counts), asdict(self._taken)
        self._taken = counts
        return {f"reward/{name}": float(now[name] - before[name]) for name in now}

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()


def all_verifiers(function: str | None = None) -> Mapping[str, Verifier]:
    """By task, a user's `function` among them; called in the process that workers come from too."""
    return VERIFIERS if function is None else {**VERIFIERS, OWN_TASK: OwnReward(function)}


def training_items(items: Sequence[TaskItem], reward: RewardConfig) -> list[TaskItem]:
    """The problems of training, to be judged by the user's function where there is one.

    Raises UserError where that is no function of a text and an answer.
    """
    if reward.function is None:
        return list(items)
    find_function(reward.function)
    return [replace(item, task=OWN_TASK) for item in items]


def check_judging(reward: RewardConfig, where: str) -> None:
    """Refuse a limit that nobody would keep."""
    if reward.workers == 0 and reward.timeout_s != RewardConfig.model_fields["timeout_s"].default:
        raise UserError(
            f"{where}: reward.timeout_s is kept by worker processes, of which reward.workers=0 starts none; "
            "set reward.workers or leave this key at its default"
        )
