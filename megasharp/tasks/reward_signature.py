"""The style of a user's reward, found by its parameters: a response's text and answer, TRL's lists, or verl's score.

A function with a parameter `completions` is of TRL's style: it is given lists over responses, and returns a list. One
with `solution_str` is of verl's; any other is given a text and an answer. Each may be `async def`, a class (made once
in each process), or an object that can be called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from functools import lru_cache
from numbers import Real
from typing import Any, get_type_hints

from megasharp.common.errors import UserError, one_line
from megasharp.common.records import TaskAnswer, Verdict
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.user_import import imported

# A column that every row has, whatever its own columns: what it was read as the answer.
ANSWER = "answer"
# What TRL hands over besides a row's other columns (`GRPOTrainer._calculate_rewards` of TRL 1.9).
_TRL_GIVEN = ("prompts", "completions", "completion_ids")
# Columns of a row that TRL does not hand over: they are what the lists above are made of.
_TRL_OWN = {"prompt", "completion", *_TRL_GIVEN}
# What TRL hands over too, and we do not.
_TRL_REFUSED = {"trainer_state", "log_extra", "log_metric", "environments"}
_VERL_GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")


class Style(StrEnum):
    """The convention by which a function is called."""

    PLAIN = "(text, answer)"
    TRL = "TRL style"
    VERL = "verl style"


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of the reward at `path`.

    `given` are those of its style that it takes; `columns` are columns of a row that it names, of which it needs
    `needed`; `all_columns`: it takes every other one too. `method` is the name of what is called of a class's object,
    "" where that is no class.

    Example: `async def f(completions, answer, **kwargs)` is `Signature(path, Style.TRL, True, ("completions",),
    ("answer",), ("answer",), True)`.
    """

    path: str
    style: Style
    asynchronous: bool
    given: tuple[str, ...]
    columns: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    all_columns: bool = False
    method: str = ""

    @property
    def batched(self) -> bool:
        """Return whether it takes several responses in one call."""
        return self.style is Style.TRL

    def columns_of(self, row: Mapping[str, Any] | None) -> list[str]:
        """Return the columns of a row that are handed to it."""
        there = [*dict.fromkeys((*(row or {}), ANSWER))]
        return [name for name in there if name not in _TRL_OWN and (self.all_columns or name in self.columns)]

    def in_words(self, row: Mapping[str, Any] | None, at_once: int) -> str:
        """Return the style in a few words.

        Example: "TRL style, batched, columns answer, level".
        """
        words = [f"class with {self.method}", self.style] if self.method else [str(self.style)]
        if self.asynchronous:
            words.append("async" if self.batched else f"async, up to {at_once} at once")
        if self.batched:
            words.append("batched")
            columns = self.columns_of(row)
            words += ["columns " + ", ".join(columns)] if columns else []
        return ", ".join(words)

    def check_rows(self, items: Sequence[TaskItem]) -> None:
        """Raise UserError where no row has a column that it needs, or where its answers are of another type."""
        for name in self.needed:
            if name != ANSWER and not any(name in (item.row or {}) for item in items):
                there = sorted({*(items[0].row or {}), ANSWER} - _TRL_OWN)
                raise UserError(
                    f"reward.function: {self.path} needs the column {name}, which no row of {items[0].source} has; "
                    f"columns there: {', '.join(there)}"
                )
        if self.style is Style.PLAIN and items:
            _check_answer(imported(self.path), self.method, items[0].answer.given, self.path)


@lru_cache(maxsize=64)
def signature_of(path: str) -> Signature:
    """Import the reward at `path` and find its style. Raises UserError, in one line, where it has none."""
    found = imported(path)
    if not callable(found):
        raise UserError(f"reward.function: {path} is a {type(found).__name__}; name a function or a class")
    method = _method(found, path) if inspect.isclass(found) else ""
    called = _called(found, method)
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward.function: {path} does not say its parameters ({one_line(error)})") from error
    parameters = list(signature.parameters.values())[1 if method else 0 :]
    named = {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    # Of an object, what calling it calls.
    is_async = any(map(inspect.iscoroutinefunction, (called, type(called).__call__)))
    if "solution_str" in named:
        return _verl(path, parameters, is_async, method)
    only_keywords = all(each.kind in (each.VAR_KEYWORD, each.KEYWORD_ONLY) for each in parameters)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if "completions" in named or (takes_any and (only_keywords or named & {*_TRL_GIVEN})):
        return _trl(path, parameters, is_async, method)
    try:
        signature = signature.replace(parameters=parameters)
        signature.bind("", TaskAnswer())
    except TypeError as error:
        raise UserError(
            f"reward.function: {path} cannot be called with (text, answer) ({one_line(error)}); give it two "
            "parameters, or those of TRL (completions, **columns) or verl (data_source, solution_str, ground_truth)"
        ) from error
    _check_annotations(called, [each.name for each in parameters], path)
    return Signature(path, Style.PLAIN, is_async, (), method=method)


def _method(found: type, path: str) -> str:
    """Return the name of what an object of the class is called by."""
    try:
        signature = inspect.signature(found)
        signature.bind()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward.function: class {path} is made without arguments, which it does not allow ({one_line(error)}); "
            "give them defaults"
        ) from error
    for name in ("__call__", "reward"):
        if inspect.isroutine(getattr(found, name, None)) and any(name in vars(base) for base in found.__mro__):
            return name
    raise UserError(f"reward.function: class {path} has neither __call__ nor reward; give it one of the two")


def _called(found: Any, method: str) -> Callable[..., Any]:
    """Return the function of a class, unbound, or the callable itself."""
    called: Callable[..., Any] = getattr(found, method) if method else found
    return called


def _trl(path: str, parameters: Collection[inspect.Parameter], is_async: bool, method: str) -> Signature:
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    anything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for each in parameters:
        if each.kind is each.POSITIONAL_ONLY or (each.name in _TRL_REFUSED and each.default is each.empty):
            why = "takes by place" if each.kind is each.POSITIONAL_ONLY else "asks for"
            raise UserError(
                f"reward.function: {path} {why} {each.name}, which is not handed over so; give it a default, or leave "
                "it out"
            )
    columns = [each for each in named if each.name not in {*_TRL_OWN, *_TRL_REFUSED}]
    needed = [each.name for each in columns if each.default is each.empty]
    given = [name for name in _TRL_GIVEN if anything or name in {each.name for each in named}]
    names = tuple(each.name for each in columns)
    return Signature(path, Style.TRL, is_async, tuple(given), names, tuple(needed), anything, method)


def _verl(path: str, parameters: Collection[inspect.Parameter], is_async: bool, method: str) -> Signature:
    anything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = {each.name: each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    for name, each in named.items():
        if each.kind is each.POSITIONAL_ONLY or (name not in _VERL_GIVEN and each.default is each.empty):
            raise UserError(
                f"reward.function: {path} needs {name}, which verl's compute_score(data_source, solution_str, "
                "ground_truth, extra_info) does not have; give it a default"
            )
    given = tuple(name for name in _VERL_GIVEN if anything or name in named)
    return Signature(path, Style.VERL, is_async, given, method=method)


def _hints(called: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(called)
    except (NameError, TypeError, AttributeError):
        return {}


def _check_annotations(called: Callable[..., Any], names: Sequence[str], path: str) -> None:
    """Refuse annotations that exclude a text, or a reward as the result; a function may have none."""
    hints = _hints(called)
    returned = hints.get("return", Real)
    if isinstance(returned, type) and not (issubclass(returned, Verdict | Real | Decimal) or hasattr(returned, "item")):
        raise UserError(
            f"reward.function: {path} says it returns {returned.__name__}; it must return a Verdict or a number"
        )
    hint = hints.get(names[0]) if names else None
    if isinstance(hint, type) and not (issubclass(hint, str) or issubclass(str, hint)):
        raise UserError(f"reward.function: {path} takes {names[0]} as {hint.__name__}; it is given a str there")


def _check_answer(found: object, method: str, answer: object, path: str) -> None:
    called = _called(found, method)
    parameters = [*inspect.signature(called).parameters][1 if method else 0 :]
    hint = _hints(called).get(parameters[1]) if len(parameters) > 1 else None
    # Values of rows are not refused by their types: many a function reads a number that it calls a text.
    records = isinstance(hint, type) and (isinstance(answer, TaskAnswer) or issubclass(hint, TaskAnswer))
    if not isinstance(hint, type) or not records or isinstance(answer, hint):
        return
    raise UserError(
        f"reward.function: {path} takes {parameters[1]} as {hint.__name__}; it is given a {type(answer).__name__} there"
    )
