"""Where a run's rewards come from: its tasks' verifiers, in this process or in a pool of worker processes.

Here is decided where responses are judged; the verifiers themselves are `tasks/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, Verdict
from megasharp.config.data import RewardConfig
from megasharp.config.run_config import RunConfig
from megasharp.evals.suites import Suite
from megasharp.tasks.judge import DirectJudge, Item, Judge, TaskItem
from megasharp.tasks.own_reward import OWN_TASK, find_function
from megasharp.tasks.sandbox.bubblewrap import RISK, open_sandbox
from megasharp.tasks.sandbox.pool import PoolCounts, VerifierPool
from megasharp.tasks.table import make_verifiers, rows_of
from megasharp.trainer.resolve.models import training_task

MOST_WORKERS = 4
# A program is ended before its worker is, which is for what hangs otherwise.
_PROGRAMS_SHARE = 0.9


class RewardJudge:
    """Gives the rewards of a run's `tasks`; `close` ends its workers, whose output goes to `log`.

    `say` gets what the user risks, and what fails first. Raises UserError where programs are to run in a sandbox
    that this machine does not have.
    """

    def __init__(
        self, reward: RewardConfig, tasks: Collection[str], log: Path | None, say: Callable[[str], None]
    ) -> None:
        sandbox = open_sandbox(reward.sandbox) if _runs_programs(tasks) else None
        if sandbox is not None and reward.sandbox == "none":
            say(RISK)
        seconds = _PROGRAMS_SHARE * reward.timeout_s
        make = partial(make_verifiers, tuple(tasks), reward.function, sandbox, seconds)
        verifiers = make()
        self._taken = PoolCounts()
        self._pool: VerifierPool | None = None
        workers = workers_for(reward, tasks)
        if workers > 0:
            self._pool = VerifierPool(partial(make, preload=True), verifiers.keys(), workers, reward.timeout_s, log=log)
        self.judge: Judge = LoggingJudge(self._pool or DirectJudge(verifiers), say)

    def take(self) -> dict[str, float]:
        """Return what happened to workers since the last call, by metric name; nothing without a pool."""
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


class LoggingJudge:
    """A judge that reports, once each, why a user's own reward failed and why a response could not be judged.

    Without that, both are only counted in the metrics, and a run in which nothing else happens trains to its end.
    """

    def __init__(self, judge: Judge, say: Callable[[str], None]) -> None:
        self._judge = judge
        self._say = say
        self._reported: set[Outcome] = set()

    @property
    def tasks(self) -> Collection[str]:
        """The tasks whose responses it can judge."""
        return self._judge.tasks

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        """Return one for each item, in order."""
        verdicts = self._judge.verdicts(items)
        for item, verdict in zip(items, verdicts, strict=True):
            if verdict.outcome is Outcome.INFRA:
                self._report(verdict, "a response could not be judged and is left out")
            elif verdict.outcome in (Outcome.ERROR, Outcome.TIMEOUT) and item.task == OWN_TASK:
                self._report(verdict, "reward.function fails on a response, which gets reward 0")
        return verdicts

    def _report(self, verdict: Verdict, what: str) -> None:
        if verdict.outcome not in self._reported:
            self._reported.add(verdict.outcome)
            self._say(f"{what} ({verdict.detail}); reported once, counted as outcome_{verdict.outcome}")


def judged_tasks(config: RunConfig, suites: Sequence[Suite]) -> set[str]:
    """Return the tasks whose verifiers a run needs: its suites', and training's where no own function judges it."""
    training = set() if config.reward.function else {training_task(config.data)}
    return training | {suite.task for suite in suites}


def training_items(items: Sequence[TaskItem], reward: RewardConfig) -> list[TaskItem]:
    """The problems of training, to be judged by the user's function where there is one.

    Raises UserError where that is no function of a text and an answer.
    """
    if reward.function is None:
        return list(items)
    find_function(reward.function)
    return [replace(item, task=OWN_TASK) for item in items]


def workers_for(reward: RewardConfig, tasks: Collection[str]) -> int:
    """Return how many processes judge: `reward.workers`, else 0, or half of the cores for what must not run here.

    A user's own function is among that, because nobody knows how long it takes.

    Example: `workers_for(RewardConfig(), {"countdown"})` is 0.
    """
    if reward.workers is not None:
        return reward.workers
    if reward.function is None and not _worker_tasks(tasks):
        return 0
    return min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) // 2))


def check_judging(reward: RewardConfig, tasks: Collection[str], where: str) -> None:
    """Refuse a limit that nobody would keep, another library's verifier in this process, programs without a sandbox."""
    workers = workers_for(reward, tasks)
    for task in _worker_tasks(tasks) if workers == 0 else []:
        raise UserError(
            f"{where}: task {task} is judged in worker processes alone, of which reward.workers=0 starts none; "
            "leave the key out, or set it to 2 say (eval: --workers 2)"
        )
    programs = _runs_programs(tasks)
    if workers == 0 and not programs and reward.timeout_s != RewardConfig.model_fields["timeout_s"].default:
        raise UserError(
            f"{where}: reward.timeout_s is kept by worker processes, of which this task starts none by itself; "
            "set reward.workers or leave this key at its default"
        )
    if programs:
        open_sandbox(reward.sandbox)


def _runs_programs(tasks: Collection[str]) -> bool:
    """Return whether a verifier of these tasks runs programs that the model wrote."""
    return any(row.sandbox for row in rows_of(tasks).values())


def _worker_tasks(tasks: Collection[str]) -> list[str]:
    """Return those whose verifier may never end: only a process that can be killed bounds it."""
    return [name for name, row in rows_of(tasks).items() if row.worker]
