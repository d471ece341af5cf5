"""Who judges responses: one small protocol, and the judge that does it in this process.

Whoever samples hands over texts and gets verdicts back; whether a pool of processes (`megasharp/tasks/sandbox/pool.py`)
or this process judged them is not its matter.

One problem before tokenization, as every task's file makes it, and the digest of many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megasharp.common.errors import one_line
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.common.signals import Stopped


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One problem before tokenization.

    `turns` are messages, each a role and a text, that the model's own chat template makes the prompt of
    (`tasks/stream.py`); where there are none, the prompt is `text` as it stands. `question` is what is asked, without
    what a prompt adds; empty where a prompt adds nothing.

    Example: `TaskItem("countdown-train-00017", "countdown", "3 5 7 8=24:", CountdownAnswer((3, 5, 7, 8), 24),
    "train.jsonl")`.
    """

    id: str
    task: str
    text: str
    answer: TaskAnswer
    source: str
    turns: tuple[tuple[str, str], ...] = ()
    question: str = ""


def digest_of(items: Sequence[TaskItem]) -> str:
    """SHA-256 of problems in their order: ids, texts and answers."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr((item.id, item.text, item.answer, *item.turns)).encode())
    return digest.hexdigest()


Verifier = Callable[[str, TaskAnswer], Verdict]


@dataclass(frozen=True, slots=True)
class Item:
    """One response to judge.

    Example: `Item("countdown", "(8-5)*7+3", CountdownAnswer((3, 5, 7, 8), 24))`.
    """

    task: str
    text: str
    answer: TaskAnswer


class Judge(Protocol):
    """Gives verdicts; safe to call from several threads."""

    @property
    def tasks(self) -> Collection[str]:
        """The tasks whose responses it can judge."""
        ...

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        """One for each item, in order. A verifier's exception is an ERROR verdict."""
        ...


@dataclass(frozen=True, slots=True)
class DirectJudge:
    """Judges in this process, one item after the other, without a time limit: for verifiers that only compute."""

    verifiers: Mapping[str, Verifier]

    @property
    def tasks(self) -> Collection[str]:
        """The tasks whose responses it can judge."""
        return self.verifiers.keys()

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        """One for each item, in order. A verifier's exception is an ERROR verdict."""
        return [verify(self.verifiers[item.task], item.text, item.answer) for item in items]


def verify(verifier: Verifier, text: str, answer: TaskAnswer) -> Verdict:
    """The verifier's verdict; ERROR with reward 0 and the exception's name and text where it raised one.

    A signal that ends the command is no verdict: its `Stopped` passes through.
    """
    try:
        return verifier(text, answer)
    except Stopped:
        raise
    # A user's function may call sys.exit, which is no wish of the trainer's.
    except (Exception, SystemExit) as error:
        return Verdict(Outcome.ERROR, 0.0, detail=f"{type(error).__name__}: {one_line(error)}")
