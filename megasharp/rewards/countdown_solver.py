"""An exhaustive Countdown solver: every distinct solution of a problem, distinct as in `canonical`.

For a multiset of numbers it combines the forms of every way to cut it in two; forms of parts are shared
between problems through a cache. Four numbers take milliseconds, five about a second the first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

from megasharp.rewards.canonical import Form, combine, number

MAX_NUMBERS = 5


def solve(numbers: tuple[int, ...], target: int) -> list[str]:
    """All distinct solutions in canonical form, sorted; empty if there is none.

    `numbers` are non-negative. Raises ValueError for none, or for more than `MAX_NUMBERS`, which would take
    too long.

    Example: `solve((1, 2, 3), 7)` is `["1+2*3"]`.
    """
    if not 1 <= len(numbers) <= MAX_NUMBERS:
        raise ValueError(f"the exhaustive solver takes 1 to {MAX_NUMBERS} numbers, got {len(numbers)}")
    if len(numbers) == 1:
        return [str(numbers[0])] if numbers[0] == target else []
    goal = Fraction(target)
    found = {
        combine(operator, left, right).text
        for first, second in _cuts(tuple(sorted(numbers)))
        for a in _forms(first)
        for b in _forms(second)
        for operator, left, right in _reaching(a, b, goal)
    }
    return sorted(found)


def count_solutions(numbers: tuple[int, ...], target: int) -> int:
    """The solution multiplicity of a problem: how many distinct solutions it has."""
    return len(solve(numbers, target))


def _cuts(numbers: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way to cut a sorted multiset into two non-empty sorted parts, each unordered pair once."""
    cuts: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    everywhere = range(len(numbers))
    for size in range(1, len(numbers) // 2 + 1):
        for chosen in combinations(everywhere, size):
            first = tuple(numbers[i] for i in chosen)
            second = tuple(numbers[i] for i in everywhere if i not in chosen)
            if (second, first) not in cuts:
                cuts.add((first, second))
    return cuts


@lru_cache(maxsize=4096)
def _forms(numbers: tuple[int, ...]) -> tuple[Form, ...]:
    """Every distinct form that uses the sorted multiset `numbers` whole."""
    if len(numbers) == 1:
        return (number(numbers[0]),)
    forms: dict[str, Form] = {}
    for first, second in _cuts(numbers):
        for a in _forms(first):
            for b in _forms(second):
                for form in _all_combinations(a, b):
                    forms[form.text] = form
    return tuple(forms.values())


def _all_combinations(a: Form, b: Form) -> Iterator[Form]:
    yield combine("+", a, b)
    yield combine("-", a, b)
    yield combine("-", b, a)
    yield combine("*", a, b)
    if b.value:
        yield combine("/", a, b)
    if a.value:
        yield combine("/", b, a)


def _reaching(a: Form, b: Form, goal: Fraction) -> Iterator[tuple[str, Form, Form]]:
    """The operations on `a` and `b` worth `goal`, found by value: building a form costs far more."""
    x, y = a.value, b.value
    if x + y == goal:
        yield "+", a, b
    if x - y == goal:
        yield "-", a, b
    if y - x == goal:
        yield "-", b, a
    if x * y == goal:
        yield "*", a, b
    if y and x == goal * y:
        yield "/", a, b
    if x and y == goal * x:
        yield "/", b, a
