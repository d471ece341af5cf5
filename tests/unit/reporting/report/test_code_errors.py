"""Reported errors of code: the paper's own examples, and text that only looks like one."""

from __future__ import annotations

from cases import each_case

from megasharp.reporting.page.responses import code_error


@each_case(
    ("text", "found"),
    [
        ("```output\nTypeError: cannot determine truth value of Relational\n```\nThe error occurs", "TypeError"),
        ("TypeError: unsupported operand type(s) for ** or pow(): 'NoneType' and 'int'", "TypeError"),
        ("timeout_decorator.timeout_decorator.TimeoutError: 'Timed Out'", "TimeoutError"),
        ("Traceback (most recent call last):\n  File\nValueError: x", "ValueError"),
        ("Traceback (most recent call last):\n  File", "Traceback"),
        ("    KeyError: 3", "KeyError"),
        ("A TypeError: this is prose", None),
        ("The error is a TypeError.", None),
        ("DeprecationWarning: old", None),
        ("DeprecationWarning: old\nIndexError: list index", "IndexError"),
        ("except TypeError:\n    pass", None),
        ("Error: a word, and no exception's name", None),
        ("", None),
    ],
)
def test_reported_errors(text: str, found: str | None) -> None:
    assert code_error(text) == found
