"""`each_case`: one test for many cheap cases, in place of `pytest.mark.parametrize`.

Whatever pytest collects costs time in each of its workers, so a hundred small cases are one test that goes through
them. A case that fails is named and hides no other, and the fixtures of a function (its folder, what it patches) are
built for each case anew.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

Test = Callable[..., None]
# A function where finding the cases is work: it is called when the test runs.
Values = Iterable[Any] | Callable[[], Iterable[Any]]
Labels = Sequence[object] | Callable[[Any], object] | None
# Characters of a value that a label shows.
LABEL = 100


@dataclass(frozen=True)
class Axis:
    """The arguments of one `each_case`: `names` take each of the `values` in turn."""

    names: tuple[str, ...]
    values: Values
    labels: Labels

    def cases(self) -> list[tuple[str, dict[str, Any]]]:
        found = list(self.values() if inspect.isfunction(self.values) else self.values)
        rows = [tuple(value) if len(self.names) > 1 else (value,) for value in found]
        return [(self._label(i, row), dict(zip(self.names, row, strict=True))) for i, row in enumerate(rows)]

    def _label(self, number: int, row: tuple[Any, ...]) -> str:
        if self.labels is not None and not callable(self.labels):
            return str(self.labels[number])
        shown = [None if self.labels is None else self.labels(value) for value in row]
        texts = [_in_words(value) if text is None else str(text) for text, value in zip(shown, row, strict=True)]
        return "-".join(text or f"{name}{number}" for text, name in zip(texts, self.names, strict=True))


def _in_words(value: Any) -> str | None:
    """A short value as it stands; None where it must be told by its number."""
    if not isinstance(value, enum.Enum | str | int | float | complex | bytes | None):
        return getattr(value, "__name__", None)
    text = repr(value) if isinstance(value, str | bytes) and not value.isalnum() else str(value)
    return text if len(text) <= LABEL else None


class CaseFixtures:
    """The fixtures of one case: those of a function are built here, wider ones are pytest's."""

    def __init__(self, request: pytest.FixtureRequest, given: Mapping[str, Any], ends: ExitStack) -> None:
        self._request = request
        self._values: dict[str, Any] = {"request": request, **given}
        self._ends = ends

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._build(name)
        return self._values[name]

    def _build(self, name: str) -> Any:
        fixture = definition(self._request, name)
        if fixture.scope != "function":
            return self._request.getfixturevalue(name)
        built = fixture.func(**{argument: self[argument] for argument in fixture.argnames})
        if not inspect.isgeneratorfunction(fixture.func):
            return built
        value = next(built)
        self._ends.callback(next, built, None)
        return value


def definition(request: pytest.FixtureRequest, name: str) -> pytest.FixtureDef[Any]:
    """The fixture of this name as the running test sees it; pytest has no public way to ask."""
    found = request._fixturemanager.getfixturedefs(name, request.node)
    assert found, f"no fixture {name!r}"
    return found[-1]


_LOOPS: dict[Test, tuple[Test, tuple[Axis, ...]]] = {}


def each_case(names: str | Sequence[str], values: Values, ids: Labels = None) -> Callable[[Test], Test]:
    """Run the test once for each case, as `pytest.mark.parametrize` would, and for all combinations of several."""
    split = tuple(names.replace(",", " ").split()) if isinstance(names, str) else tuple(names)

    def decorate(test: Test) -> Test:
        body, axes = _LOOPS.get(test, (test, ()))
        axes = (Axis(split, values, ids), *axes)
        given_names = {name for axis in axes for name in axis.names}
        parameters = inspect.signature(body).parameters.values()
        wanted = [parameter.name for parameter in parameters if parameter.default is parameter.empty]

        def loop(request: pytest.FixtureRequest, subtests: pytest.Subtests) -> None:
            __tracebackhide__ = True
            # What applies without being asked for: pytest has set it up for the test, and here it is for the case.
            around = [name for name in request.fixturenames if name not in ("request", "subtests")]
            around = [name for name in around if definition(request, name).scope == "function"]
            combinations = list(itertools.product(*(axis.cases() for axis in axes)))
            assert combinations, "there is no case"
            for combination in combinations:
                label = "-".join(label for label, _ in combination)
                given = {name: value for _, case in combination for name, value in case.items()}
                with subtests.test(msg=label), ExitStack() as ends:
                    # As tests/conftest.py does for a test: a command ignores SIGUSR1 when it ends.
                    ends.callback(signal.signal, signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
                    fixtures = CaseFixtures(request, given, ends)
                    for name in around:
                        fixtures[name]
                    body(**{name: fixtures[name] for name in wanted})

        assert len(given_names) == sum(len(axis.names) for axis in axes), "a name is given twice"
        signature = inspect.signature(loop)
        functools.update_wrapper(loop, test)
        loop.__wrapped__ = body  # type: ignore[attr-defined]
        loop.__signature__ = signature  # type: ignore[attr-defined]
        _LOOPS[loop] = body, axes
        return loop

    return decorate
