"""Problems that reasoning-gym generates, answered in several tries: a wrong answer may be corrected.

    use: reasoning_gym
    options: {name: chain_sum, config: {max_terms: 4}, tries: 3}
    count: 500

A row's `seed` is that of a data set of one problem. The reward is the score of the last answer, which is the first
right one, or that of the last try; with one try the rewards are those of the task `reasoning_gym`.

Answers are judged as that task's are: the library's scorers evaluate what a model wrote, so they run in worker
processes of this environment's own, which are ended where they take longer than `SECONDS`.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from functools import lru_cache, partial
from threading import Lock
from typing import Any

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, Verdict
from megasharp.tasks.environment import Observation, Row
from megasharp.tasks.environments.text_play import TextPlay
from megasharp.tasks.judge import Item
from megasharp.tasks.prompts import TEMPLATES
from megasharp.tasks.reasoning_gym import GymAnswer, GymDataset, problem
from megasharp.tasks.sandbox.pool import VerifierPool
from megasharp.tasks.table import make_verifiers

_opening = Lock()
TASK = "reasoning_gym"
SECONDS = 30.0
MOST_WORKERS = 2


class ReasoningGymTries(TextPlay):
    """A problem of the data set `name`, with `tries` answers at most."""

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        tries: int = 3,
        prompt: str = TEMPLATES["tags_chat"].text_of("{}"),
        chat: bool = True,
        wrong: str = "That is wrong. Try again.",
        unread: str = "There is no answer between <answer> and </answer>. Try again.",
    ) -> None:
        super().__init__(prompt, chat=chat)
        if tries < 1:
            raise UserError(f"tries: at least 1, got {tries}")
        self._name, self._config, self._tries = name, json.dumps(dict(config or {}), sort_keys=True), tries
        self._wrong, self._unread = wrong, unread

    def reset(self, row: Row) -> Observation:
        """Generate the problem of the row's seed."""
        self._problem = GymAnswer(GymDataset(self._name, 1, int(row["seed"]), self._config), 0)
        self._left = self._tries
        return self._first(str(problem(self._problem)["question"]))

    def step(self, action: str) -> Observation:
        """Judge an answer."""
        verdict = _judged(Item(TASK, action, self._problem))
        self._left -= 1
        right = verdict.outcome is Outcome.CORRECT
        done = right or not self._left
        info = {"correct": right, "answer": verdict.canonical_answer, "detail": verdict.detail}
        text = self._unread if verdict.outcome is Outcome.FORMAT else self._wrong
        return self._said(text, reward=verdict.reward if done else 0.0, done=done, info=info)


def _judged(item: Item) -> Verdict:
    with _opening:
        pool = _pool()
    (verdict,) = pool.verdicts([item])
    if verdict.failure:
        raise RuntimeError(verdict.failure)
    return verdict


@lru_cache(maxsize=1)
def _pool() -> VerifierPool:
    make = partial(make_verifiers, (TASK,), preload=True)
    pool = VerifierPool(make, (TASK,), min(MOST_WORKERS, os.cpu_count() or 1), SECONDS)
    atexit.register(pool.close)
    return pool
