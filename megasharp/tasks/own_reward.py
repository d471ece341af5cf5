"""A user's own reward: a Python function that is named by its path, checked before a run starts.

The function takes a response's text and the problem's answer, a record of the task's, and returns a Verdict or a
number: Python's, or a bool or one number of numpy or torch, none of which is imported for it. Verdicts are made plain
here, before they leave the process.

Worker processes are sent its path; each imports the function for itself, so its module must be importable there:
installed, or in a folder of PYTHONPATH.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from importlib import import_module
from numbers import Real
from reprlib import repr as short_repr
from typing import get_type_hints

from megasharp.common.errors import UserError, one_line
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.judge import LONGEST_LINE

# The task of training prompts that a user's function judges; evaluations keep the verifier of their own task. A source
# with a function of its own has the task `own/<source>`.
OWN_TASK = "own"
FULL_REWARD = 1.0
_LARGEST = 1e30

OwnFunction = Callable[[str, TaskAnswer], Verdict | float]


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
class OwnReward:
    """A verifier that calls the function at `path`, imported at the first call.

    Example: `OwnReward("mine.rewards:brief")`, where `brief(text, answer)` returns 0.5.
    """

    path: str

    def __call__(self, text: str, answer: TaskAnswer) -> Verdict:
        """Return the function's verdict; `verdict_of` makes one of a number. The function's exceptions pass through."""
        return verdict_of(find_function(self.path)(text, answer))


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
    if not isinstance(value, Real | Decimal):
        # One number of numpy, torch or jax; of several it raises.
        item = getattr(value, "item", None)
        try:
            value = item() if callable(item) else None
        except Exception:
            return None
    return float(value) if isinstance(value, Real | Decimal) else None


def _finite(reward: float) -> float:
    # Beyond this, squares in a group's statistics overflow, and every advantage would be zero.
    if not abs(reward) <= _LARGEST:
        raise UnusableReward(f"returned the reward {reward}, which nothing can learn from")
    return reward


def _shown(value: object) -> str:
    return f"{short_repr(value)} ({type(value).__name__})"


@lru_cache(maxsize=8)
def find_function(path: str) -> OwnFunction:
    """Import the function at `package.module:function`. Raises UserError, in one line, where it is no such function."""
    module_name, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise UserError(f"reward.function: {path!r} must be written package.module:function")
    try:
        found: object = import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise UserError(
            f"reward.function: cannot import {module_name} ({type(error).__name__}: {one_line(error)}); "
            "install it, or put its folder into PYTHONPATH"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"reward.function: {module_name} has no {name!r}; name one of its functions")
        found = getattr(found, part)
    return _checked(found, path)


def _checked(found: object, path: str) -> OwnFunction:
    if not callable(found):
        raise UserError(f"reward.function: {path} is a {type(found).__name__}; name a function of (text, answer)")
    if inspect.iscoroutinefunction(found):
        raise UserError(f"reward.function: {path} is asynchronous; name a function that returns its reward")
    try:
        inspect.signature(found).bind("", TaskAnswer())
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward.function: {path} cannot be called with (text, answer) ({one_line(error)}); give it two parameters"
        ) from error
    _check_annotations(found, path)
    function: OwnFunction = found
    return function


def _check_annotations(found: Callable[..., object], path: str) -> None:
    """Refuse annotations that exclude the arguments or the result of a reward; a function may have none."""
    try:
        hints = get_type_hints(found)
    except (NameError, TypeError, AttributeError):
        return
    returned: object = hints.pop("return", Real)
    if isinstance(returned, type) and not (issubclass(returned, Verdict | Real | Decimal) or hasattr(returned, "item")):
        raise UserError(
            f"reward.function: {path} says it returns {returned.__name__}; it must return a Verdict or a number"
        )
    names = list(inspect.signature(found).parameters)[:2]
    for name, kind in zip(names, (str, TaskAnswer), strict=False):
        hint = hints.get(name)
        if isinstance(hint, type) and not (issubclass(hint, kind) or issubclass(kind, hint)):
            raise UserError(
                f"reward.function: {path} takes {name} as {hint.__name__}; it is given a {kind.__name__} there"
            )
