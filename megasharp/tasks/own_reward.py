"""A user's own reward: values that functions return become verdicts, one function or several with weights.

A value is a Verdict or a number: Python's, or a bool or one number of numpy or torch, none of which is imported for it.
Verdicts are made plain here, before they leave the process. How a function is called is its signature's
(`reward_signature.py`, `reward_call.py`); worker processes are sent its path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property, partial
from numbers import Real
from reprlib import repr as short_repr

from megasharp.common.records import Outcome, Verdict
from megasharp.tasks.judge import LONGEST_LINE, Item, ItemVerifier, failed
from megasharp.tasks.reward_call import Running, TooLate, gathered, running, waited
from megasharp.tasks.reward_signature import Style, signature_of

# The task of training prompts that a user's function judges; evaluations keep the verifier of their own task. A source
# with a function of its own has the task `own/<source>`.
OWN_TASK = "own"
FULL_REWARD = 1.0
_LARGEST = 1e30
# The usual ones first, which need no look at what is registered as a number.
_NUMBERS = (float, int, Real, Decimal)
# Responses of a call, from which on the next prompt's wait for another one.
BATCH = 64

_Passing = tuple[type[BaseException], ...]


def own_task(source: str = "") -> str:
    """Return the task of what a user's function judges, of all prompts or of those of one source.

    Example: `own_task("chat")` is "own/chat".
    """
    return f"{OWN_TASK}/{source}" if source else OWN_TASK


def is_own(task: str) -> bool:
    """Return whether a user's function judges the task."""
    return task.partition("/")[0] == OWN_TASK


class UnusableReward(ValueError):
    """A return value that is no reward; the message begins with "returned"."""


@dataclass(frozen=True, slots=True)
class OwnFunction:
    """One function of a reward: its path, its share of the sum, and the name under which it is logged.

    Example: `OwnFunction("mine.rewards:brief", 0.2)` is logged as "brief".
    """

    path: str
    weight: float = 1.0
    name: str = ""

    @property
    def label(self) -> str:
        """The name in metrics."""
        return self.name or self.path.rpartition(":")[2]


@dataclass(frozen=True)
class OwnReward(ItemVerifier):
    """A verifier that calls `functions`, each imported and made at the first call of a process.

    The reward is the sum of their values, each times its weight; a function that returns None for a response has no
    part in its sum. What is correct, and the answer that is counted, is up to the first function that has a part.
    `at_once` bounds the `async def` calls of this process that are under way, each for `seconds`.

    Example: `OwnReward((OwnFunction("mine.rewards:brief"),))`, where `brief(text, answer)` returns 0.5.
    """

    functions: tuple[OwnFunction, ...]
    at_once: int = 1
    seconds: float | None = None

    @cached_property
    def batch(self) -> int:
        """Responses of a call. Raises UserError where a function cannot be imported."""
        found = [signature_of(each.path) for each in self.functions]
        return BATCH if any(each.batched or each.asynchronous for each in found) else 1

    @cached_property
    def compares(self) -> bool:
        """Return whether a function is given several responses, which it may compare. Raises UserError as `batch`."""
        return any(signature_of(each.path).batched for each in self.functions)

    @cached_property
    def reads_rows(self) -> bool:
        """Return whether a function takes more than a text and an answer."""
        return any(signature_of(each.path).style is not Style.PLAIN for each in self.functions)

    def set_up(self) -> None:
        """Import, make and set up all functions."""
        for each in self.functions:
            running(each.path)

    def close(self) -> None:
        """Close those that have a `close`."""
        for each in self.functions:
            # What was never made raises again; the process ends in any case.
            with suppress(Exception):
                running(each.path).close()

    def verdicts(self, items: Sequence[Item], passing: _Passing = ()) -> list[Verdict]:
        """One for each item, in order; an exception of a function's is an ERROR verdict, but those of `passing`."""
        by_function = [self._judged(each, items, passing) for each in self.functions]
        if len(by_function) == 1 and self.functions[0].weight == 1.0:
            # Each response has a call of its own, and most verdicts are whole as they are.
            return [each if each and not each.parts else self._total([each]) for each in by_function[0]]
        return [self._total(found) for found in zip(*by_function, strict=True)]

    def _judged(self, function: OwnFunction, items: Sequence[Item], passing: _Passing) -> list[Verdict | None]:
        """Return a function's own verdicts, without its weight; None where it does not apply."""
        try:
            called = running(function.path)
        except BaseException as error:
            return [failed(error, passing)] * len(items)
        if called.signature.batched:
            return self._batch(called, items, passing)
        style, asynchronous = called.signature.style, called.signature.asynchronous
        if asynchronous:
            calls = [partial(called.one, item) for item in items]
            results = gathered(calls, self.at_once, self.seconds)
            return [_read(value, error, style, passing) for value, error in results]
        return [_called(called, item, style, passing) for item in items]

    def _batch(self, called: Running, items: Sequence[Item], passing: _Passing) -> list[Verdict | None]:
        try:
            returned = called.several(items)
            if called.signature.asynchronous:
                returned = waited(returned)
        except BaseException as error:
            verdict = failed(error, passing)
            # One response may be to blame: all others get what is theirs.
            return [verdict] if len(items) == 1 else [self._batch(called, [item], passing)[0] for item in items]
        try:
            values = _listed(returned, len(items))
        except UnusableReward as error:
            return [failed(error)] * len(items)
        return [_read(value, None, Style.TRL, passing) for value in values]

    def _total(self, found: Sequence[Verdict | None]) -> Verdict:
        pairs = [(each, verdict) for each, verdict in zip(self.functions, found, strict=True) if verdict is not None]
        for each, verdict in pairs:
            if verdict.failure:
                if len(found) == 1:
                    return verdict
                named = f"{each.label}: {verdict.detail}", f"{each.label}: {verdict.failure}"
                return replace(verdict, detail=named[0], failure=named[1])
        if not pairs:
            some = "a function must apply to every response" if len(found) == 1 else "one must apply to every response"
            return failed(UnusableReward(f"returned None; {some}"))
        first = pairs[0][1]
        extra = {f"{each.label}/{key}": value for each, verdict in pairs for key, value in verdict.parts.items()}
        if len(found) == 1 and self.functions[0].weight == 1.0:
            return replace(first, parts=extra) if extra else first
        if len(found) == 1:
            return replace(first, reward=first.reward * self.functions[0].weight, parts=extra)
        total = sum(each.weight * verdict.reward for each, verdict in pairs)
        try:
            total = _finite(total)
        except UnusableReward as error:
            return failed(error)
        return replace(first, reward=total, parts={each.label: verdict.reward for each, verdict in pairs} | extra)


def _called(called: Running, item: Item, style: Style, passing: _Passing) -> Verdict | None:
    try:
        return _value(called.one(item), style)
    except BaseException as error:
        return failed(error, passing)


def _read(value: object, error: BaseException | None, style: Style, passing: _Passing) -> Verdict | None:
    if isinstance(error, TooLate):
        return Verdict(Outcome.TIMEOUT, 0.0, detail=str(error), failure=str(error))
    try:
        if error is not None:
            raise error
        return _value(value, style)
    except BaseException as raised:
        return failed(raised, passing)


def _value(returned: object, style: Style) -> Verdict | None:
    """Return the verdict that a function of this style gives by one value; None is one of TRL's alone."""
    if returned is None and style is Style.TRL:
        return None
    if style is Style.VERL and isinstance(returned, Mapping):
        if "score" not in returned:
            raise UnusableReward(f"returned {_shown(returned)}, a table without score")
        parts = {str(key): _number(value) for key, value in returned.items() if key != "score"}
        numbers = {key: value for key, value in parts.items() if value is not None and abs(value) <= _LARGEST}
        return replace(verdict_of(returned["score"]), parts=numbers)
    return verdict_of(returned)


def _listed(returned: object, count: int) -> list[object]:
    """Return a batch's values. Raises UnusableReward for what is no list of `count`."""
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
        raise UnusableReward(f"returned {_shown(returned)}; TRL's style returns a list, a number for each completion")
    try:
        values = [*returned]  # type: ignore[misc]
    except Exception:
        raise UnusableReward(f"returned {_shown(returned)}, of which no list can be made") from None
    if len(values) != count:
        raise UnusableReward(f"returned {len(values)} rewards for {count} completions")
    return values


def verdict_of(returned: object) -> Verdict:
    """Return a Verdict with plain fields; of a number, CORRECT where it is at least 1, else WRONG, with that reward.

    Raises UnusableReward for anything else, and for a reward that is not finite.

    Example: `verdict_of(0.5)` is `Verdict(Outcome.WRONG, 0.5)`.
    """
    if isinstance(returned, Verdict):
        return _plain(returned)
    if returned is None:
        raise UnusableReward("returned None; every response needs a number or a Verdict")
    reward = _number(returned)
    if reward is None:
        raise UnusableReward(f"returned {_shown(returned)}, neither a number nor a Verdict")
    return Verdict(Outcome.CORRECT if reward >= FULL_REWARD else Outcome.WRONG, _finite(reward))


def _plain(verdict: Verdict) -> Verdict:
    """Return the verdict with fields of Python's own types, which JSON and tables hold."""
    reward = _number(verdict.reward)
    if reward is None:
        raise UnusableReward(f"returned a Verdict whose reward is {_shown(verdict.reward)}, not a number")
    try:
        outcome = Outcome(verdict.outcome)
    except ValueError:
        raise UnusableReward(f"returned a Verdict whose outcome is {_shown(verdict.outcome)}, not an Outcome") from None
    answer, detail = verdict.canonical_answer, verdict.detail
    for name, text in (("canonical_answer", answer), ("detail", detail)):
        if not isinstance(text, str | None):
            raise UnusableReward(f"returned a Verdict whose {name} is {_shown(text)}, not a text")
    return Verdict(outcome, _finite(reward), None if answer is None else str(answer), str(detail or "")[:LONGEST_LINE])


def _number(value: object) -> float | None:
    """Return one number of any library as a float, None for what is none."""
    if not isinstance(value, _NUMBERS):
        # One number of numpy, torch or jax; of several it raises.
        item = getattr(value, "item", None)
        try:
            value = item() if callable(item) else None
        except Exception:
            return None
    return float(value) if isinstance(value, _NUMBERS) else None


def _finite(reward: float) -> float:
    # Beyond this, squares in a group's statistics overflow, and every advantage would be zero.
    if not abs(reward) <= _LARGEST:
        raise UnusableReward(f"returned the reward {reward}, which nothing can learn from")
    return reward


def _shown(value: object) -> str:
    return f"{short_repr(value)} ({type(value).__name__})"
