"""The contract of an environment, which answers what the policy says, turn by turn, and rewards it.

    class Guess(Environment):
        async def reset(self, row):
            self.number = row["number"]
            return Observation("guess a number: ")

        async def step(self, action):
            right = action.strip() == str(self.number)
            return Observation("no: ", reward=float(right), done=right)

Methods may be plain functions too, `def step(self, action)`, which are then called in a thread: so they may block, by
`time.sleep`, a long computation or a socket. Coroutines share one event loop with those of all other episodes, and what
blocks there holds up everybody; hand it to `asyncio.to_thread`.

One object plays one episode at a time. The same row and the same actions must give the same observations: a response
that was cut off goes on by replaying its actions. Whatever is random takes its seed from the row.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from megasharp.common.errors import one_line
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.judge import TaskItem

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer: `text` as it stands, or `messages` (role, text) for the model's chat template.

    `reward` is for the action that it answers. With `done` the episode ends, and what the observation says is not read
    by the policy any more. Of `info` these keys are known, in the last observation: `correct` (by default whether the
    rewards add up to more than 0; False in an episode that a limit cuts), `answer`, a canonical text of what was done,
    by which distinct solutions are counted, and `detail`. A fourth one, `judge`, leaves the verdict to the problem's
    task, which judges the policy's last turn; the tasks `environment` and `maze` have no verifier that could.
    """

    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(ABC):
    """Answers the policy. What any of these raises is a failure of the environment, and says nothing of the policy.

    One that does not repeat itself (it reads a clock, say) sets `repeats` to False. A response that goes on then keeps
    the answers that it has, whatever the environment answers to the same actions now.
    """

    repeats = True

    @abstractmethod
    def reset(self, row: Row) -> Observation | Awaitable[Observation]:
        """Begin an episode on a problem; the observation is the prompt, the same each time."""

    @abstractmethod
    def step(self, action: str) -> Observation | Awaitable[Observation]:
        """Answer the policy's turn, decoded without special tokens."""

    def close(self) -> Awaitable[None] | None:
        """Release what the object holds."""
        return None


class EnvironmentAnswer(TaskAnswer, ABC):
    """The part of an environment's problem that an episode needs: how to make the environment, and the row."""

    __slots__ = ()

    @property
    @abstractmethod
    def row(self) -> Row:
        """The row that an episode begins with."""

    @property
    def tools(self) -> str:
        """The schemas that the chat template writes, a JSON list; empty where there are none."""
        return ""

    @property
    def example(self) -> Observation | None:
        """An answer such as the environment gives, for a check of the chat template; None: it is asked for one."""
        return None

    def begins_with(self, first: Observation) -> bool:
        """Return True where an environment's first observation may be the problem's prompt."""
        return True

    @abstractmethod
    def environment(self) -> Environment:
        """Make an environment for one episode."""


async def called(method: Callable[..., Any], *arguments: object) -> Any:
    """Call a method of an environment: a coroutine function here, a plain function in a thread of its own.

    Nobody can end a thread: one whose caller has given up runs on until it returns, and never keeps a process alive.
    """
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def tell(found: object, error: BaseException | None = None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(found)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            answer.set_exception(error)
        else:
            # Exceptions that would end the loop, or that no future takes.
            answer.set_exception(RuntimeError(repr(error)))

    def work() -> None:
        said: tuple[object, ...]
        try:
            said = (method(*arguments),)
        except BaseException as error:  # a user's program; whoever awaits the answer gets it
            said = (None, error)
        # The loop has ended where nobody waits any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, *said)

    threading.Thread(target=work, name="environment", daemon=True).start()
    found = await answer
    # A plain function may return a coroutine, as a partial of one does.
    return await found if inspect.isawaitable(found) else found


class NoObservation(Exception):
    """Raised for a return value that is no observation; the message says why, behind the environment's name."""


def checked(found: object) -> Observation:
    """Return an observation whose parts are of their kinds. Raises NoObservation for what is none.

    A message may be a pair, or an object with `role` and `content`.
    """
    try:
        return _read(found)
    except NoObservation:
        raise
    except Exception as error:  # what it holds is a user's, and may raise as it is looked at
        raise NoObservation(f"gave what cannot be read: {one_line(error)}") from error


def _read(found: object) -> Observation:
    if not isinstance(found, Observation):
        raise NoObservation(f"returned {type(found).__name__}, which is no megasharp.tasks.environment.Observation")
    reward: object = found.reward
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise NoObservation(f"gave the reward {reward!r}, which is no finite number")
    messages: object = found.messages
    if not isinstance(found.text, str) or not isinstance(messages, Sequence) or isinstance(messages, str):
        raise NoObservation("says neither a text nor messages, each a pair of texts (role, text)")
    given = tuple(map(_message, messages))
    return replace(found, reward=float(reward), done=bool(found.done), messages=given, info=_info(found.info))


# Truth values of NumPy and torch, which are no numbers.
_TRUTH = ("bool_", "bool", "Tensor")


def _info(given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise NoObservation(f"gave the info {given!r}, which is no mapping")
    known: dict[str, Any] = {name: str(given[name]) for name in ("answer", "detail") if given.get(name) is not None}
    if "correct" in given:
        correct: object = given["correct"]
        if not isinstance(correct, Real) and type(correct).__name__ not in _TRUTH:
            raise NoObservation(f"gave the info correct {correct!r}, which is neither true nor false")
        known["correct"] = bool(correct)
    return {**given, **known}


def _message(given: object) -> tuple[str, str]:
    pair = (given.get("role"), given.get("content")) if isinstance(given, Mapping) else given
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise NoObservation("says neither a text nor messages, each a pair of texts (role, text)")
    return pair[0], pair[1]


def plays(items: Iterable[TaskItem]) -> bool:
    """Return True where some problem is an environment's."""
    return any(isinstance(item.answer, EnvironmentAnswer) for item in items)


def verdict_of(last: Observation, reward: float) -> Verdict | None:
    """Return the verdict of an episode whose rewards add up to `reward`, from its last observation.

    None where that leaves it to the problem's task.
    """
    if last.info.get("judge"):
        return None
    correct = bool(last.info.get("correct", reward > 0.0))
    answer = last.info.get("answer")
    outcome = Outcome.CORRECT if correct else Outcome.WRONG
    return Verdict(outcome, reward, None if answer is None else str(answer), str(last.info.get("detail", "")))


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """Judge a response of an environment's problem that has no episode: nobody but the environment can."""
    return Verdict(Outcome.INFRA, 0.0, detail="only its environment can judge this response, while it is sampled")
