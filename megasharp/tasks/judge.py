"""Problems and judges: the records that every task's file makes and reads, and the protocol of a judge.

A task's file makes each problem a `TaskItem` and has a `Verifier`. A sampler hands texts to a `Judge` and gets verdicts
back; it does not know whether this process (`DirectJudge`) or a pool of processes (`megasharp/tasks/sandbox/pool.py`)
has judged them.
"""

from __future__ import annotations

import hashlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

from megasharp.common import signals
from megasharp.common.errors import one_line
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.common.terminal import visible


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One problem before tokenization.

    `turns` are messages, each a role and a text, of which the model's own chat template makes the prompt
    (`tasks/stream.py`); where there are none, the prompt is `text` as it stands. `question` is the problem without
    the words that a prompt adds; empty where a prompt adds nothing. `tools` is a JSON list of the schemas that the chat
    template writes too; empty where there are none. `row` has all columns of the row that it was read
    from, for a user's own reward; it is no part of equality or of the digest.

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
    row: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    tools: str = ""

    @property
    def messages(self) -> tuple[tuple[str, str], ...]:
        """The messages of a row whose prompt is a list of them; none where it is a text, whatever the model reads."""
        return () if self.question else self.turns


def digest_of(items: Sequence[TaskItem]) -> str:
    """Return the SHA-256 of problems in their order: ids, texts, answers, messages and tools."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr((item.id, item.text, item.answer, *item.turns, *filter(None, [item.tools]))).encode())
    return digest.hexdigest()


# A pure function from a response's text and the problem's answer to a verdict.
Verifier = Callable[[str, TaskAnswer], Verdict]


@dataclass(frozen=True, slots=True)
class Item:
    """One response to judge.

    A user's own reward may read the `prompt`, `turns` and `row` of its problem, and its `tokens`, the end token too.
    `truncated`: the response met the limit of tokens. `in_thinking`: the prompt, as the model read it, has opened
    thinking, which the response is to close (`final_answer.py`).

    Example: `Item("countdown", "(8-5)*7+3", CountdownAnswer((3, 5, 7, 8), 24))`.
    """

    task: str
    text: str
    answer: TaskAnswer
    prompt: str = ""
    turns: tuple[tuple[str, str], ...] = ()
    row: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    tokens: Sequence[int] = field(default=(), compare=False, repr=False)
    truncated: bool = False
    in_thinking: bool = False

    @classmethod
    def of(cls, problem: TaskItem, task: str, text: str, **rest: Any) -> Item:
        """Make the item of a response to a problem, judged by the verifier of `task`; `rest` are further fields."""
        prompt = problem.question or problem.text
        return cls(task, text, problem.answer, prompt, problem.messages, problem.row, **rest)


class ItemVerifier(ABC):
    """A verifier of whole items, of several in one call: a user's own reward."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """The number of items from which on a call is full; 1 where each has a call of its own."""

    @property
    @abstractmethod
    def reads_rows(self) -> bool:
        """Return whether it reads more of an item than a text and an answer."""

    @abstractmethod
    def verdicts(self, items: Sequence[Item], passing: tuple[type[BaseException], ...] = ()) -> list[Verdict]:
        """Return a verdict per item, in order; its exceptions, but those of `passing`, are ERROR verdicts."""

    @abstractmethod
    def set_up(self) -> None:
        """Do what the first call would do once in its process; what fails here fails there too."""

    @abstractmethod
    def close(self) -> None:
        """Give back what this process has taken; it ends."""


Verifiers = Mapping[str, Verifier | ItemVerifier]


def batches(items: Sequence[Item], own: Mapping[str, ItemVerifier], share: int) -> Iterator[list[Item]]:
    """Split items, in their order, into calls: one each, or of the `own` tasks as many as those take.

    Responses to one prompt stay together, so that a reward may compare them. With `share` items a call is full too, so
    that all workers have some.
    """
    full = {task: max(1, min(each.batch, share)) for task, each in own.items() if each.batch > 1}
    batch: list[Item] = []
    for item in items:
        if batch and not (
            item.task == batch[0].task
            and item.task in full
            and (len(batch) < full[item.task] or item.prompt == batch[-1].prompt)
        ):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


class Judge(Protocol):
    """Gives verdicts; safe to call from several threads."""

    @property
    def tasks(self) -> Collection[str]:
        """The tasks whose responses it can judge."""
        ...

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        """Return a verdict per item, in order. A verifier's exception is an ERROR verdict."""
        ...


@dataclass(frozen=True, slots=True)
class DirectJudge:
    """The judge in this process: one item after the other, without a time limit, for verifiers that only compute."""

    verifiers: Verifiers

    @property
    def tasks(self) -> Collection[str]:
        """The tasks whose responses it can judge."""
        return self.verifiers.keys()

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        """Return a verdict per item, in order. A verifier's exception is an ERROR verdict."""
        found: list[Verdict] = []
        for task, run in groupby(items, key=attrgetter("task")):
            verifier, same = self.verifiers[task], list(run)
            # One that takes an item a call takes them all here, where no call has a limit of its own.
            if isinstance(verifier, ItemVerifier) and verifier.batch > 1:
                calls = batches(same, {task: verifier}, len(same))
                found += [verdict for call in calls for verdict in verifier.verdicts(call)]
            else:
                found += verdicts_of(verifier, same)
        return found


def verdicts_of(
    verifier: Verifier | ItemVerifier, items: Sequence[Item], passing: tuple[type[BaseException], ...] = ()
) -> list[Verdict]:
    """Return a verdict for each item, in order; exceptions of the verifier's, but those of `passing`, are `failed`."""
    if isinstance(verifier, ItemVerifier):
        return verifier.verdicts(items, passing)
    return [verify(verifier, item.text, item.answer, passing) for item in items]


# Of what a verifier raised: characters of a line, and lines of a traceback, whose end says most.
LONGEST_LINE = 500
_MOST_LINES = 60
# Frames of these modules come first in every traceback, and say nothing.
_CALLERS = {
    __name__,
    *(f"megasharp.tasks.{name}" for name in ("own_reward", "reward_call", "sandbox.worker")),
    *("asyncio.base_events", "asyncio.runners"),
}


def verify(verifier: Verifier, text: str, answer: TaskAnswer, passing: tuple[type[BaseException], ...] = ()) -> Verdict:
    """Return the verifier's verdict, or `failed`."""
    try:
        verdict = verifier(text, answer)
        if not isinstance(verdict, Verdict):
            raise TypeError(f"the verifier returned {type(verdict).__name__}, not a Verdict")
        return verdict
    # A user's function may call sys.exit or let a cancellation through, which must not end the trainer.
    except BaseException as error:
        return failed(error, passing)


def failed(error: BaseException, passing: tuple[type[BaseException], ...] = ()) -> Verdict:
    """Return the verdict of a verifier that raised: ERROR with reward 0, the exception and its traceback.

    What ends the command is no verdict: a signal, and the error that another thread found, are raised again, and so
    are those of `passing`.
    """
    if isinstance(error, (signals.Stopped, signals.SaveAsked, *passing)) or error is signals.failure():
        raise error
    detail = visible(f"{type(error).__name__}: {one_line(error)}"[:LONGEST_LINE])
    return Verdict(Outcome.ERROR, 0.0, detail=detail, failure=_failure(error))


def _failure(error: BaseException) -> str:
    """Return the exception's type and line of code, then its traceback from the verifier's own first frame, if any."""
    own = last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    while own is not None and own.tb_frame.f_globals.get("__name__") in _CALLERS:
        own = own.tb_next
    place = "" if last is None else f" at {last.tb_frame.f_code.co_filename}:{last.tb_lineno}"
    kind = f"{type(error).__name__}{place}"
    if own is None:
        return visible(kind)
    lines = "".join(traceback.format_exception(type(error), error, own)).splitlines()
    # Without the lines that only mark a part of the line above.
    said = [line[:LONGEST_LINE] for line in lines if line.strip(" ^~")][-_MOST_LINES:]
    return visible("\n".join((kind, *said)))
