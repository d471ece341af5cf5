"""Canonical forms against a second notion of sameness: equal rational functions, at generic points."""

from __future__ import annotations

from itertools import permutations
from random import Random

from cases import each_case

from megasharp.tasks.arithmetic import parse

# Large and unrelated, so that no two different expressions of four of them share a value by chance.
POINTS = (1_000_003, 7_368_787, 15_485_863, 104_395_301)


def all_expressions(numbers: tuple[int, ...]) -> list[str]:
    """Every fully parenthesised expression over `numbers` in this order."""
    if len(numbers) == 1:
        return [str(numbers[0])]
    return [
        f"({left}{operator}{right})"
        for cut in range(1, len(numbers))
        for left in all_expressions(numbers[:cut])
        for right in all_expressions(numbers[cut:])
        for operator in "+-*/"
    ]


@each_case(("count", "expected"), [(1, 1), (2, 6), (3, 68), (4, 1170)])
def test_distinct_forms_are_exactly_distinct_functions(count: int, expected: int) -> None:
    """A form is a value at generic points and the reverse; the counts are OEIS A140606."""
    pairs = {
        (form.text, form.value)
        for order in permutations(POINTS[:count])
        for text in all_expressions(order)
        for form in [parse(text)[0]]
    }
    assert len(pairs) == expected
    assert len({text for text, _ in pairs}) == expected
    assert len({value for _, value in pairs}) == expected


@each_case(
    ("one", "other"),
    [
        ("3+5", "5+3"),
        ("(1+2)+3", "1+(3+2)"),
        ("9-(5-2)", "9-5+2"),
        ("9-(5+2)", "9-5-2"),
        ("8/(4/2)", "8*2/4"),
        ("8/4/2", "8/(2*4)"),
        ("(9-2)*(8-3)", "(3-8)*(2-9)"),
        ("9-(5-2)*4", "9+(2-5)*4"),
        ("2*(3+4)", "(4+3)*2"),
        ("7-(5-5)*3", "7+(5-5)*3"),
        ("7-(5-3-2)*4", "7+(3+2-5)*4"),
        ("(5-1)/(7-3)", "(1-5)/(3-7)"),
    ],
)
def test_trivially_equal_expressions_coincide(one: str, other: str) -> None:
    assert parse(one)[0].text == parse(other)[0].text


@each_case(
    ("one", "other"),
    [("2*2", "2+2"), ("5*1", "5/1"), ("2*(3+4)", "2*3+4"), ("3*(5-4)", "3/(5-4)"), ("9-5", "5-9")],
)
def test_expressions_that_reason_differently_stay_apart(one: str, other: str) -> None:
    assert parse(one)[0].text != parse(other)[0].text


def test_a_form_read_back_is_itself() -> None:
    rng = Random(1)
    shapes = all_expressions((3, 7, 5, 5)) + all_expressions((2, 8, 8, 1))
    checked = 0
    for text in rng.sample(shapes, 400):
        try:
            form, _ = parse(text)
        except ZeroDivisionError:
            continue
        if form.value >= 0:
            assert parse(form.text)[0] == form
            checked += 1
        else:
            assert form.text.startswith("-") or form.minus
    assert checked > 100
