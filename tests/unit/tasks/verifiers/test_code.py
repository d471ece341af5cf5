"""Programs in responses, and what counts as the same output or value: LiveCodeBench's rules."""

from __future__ import annotations

import time

from cases import each_case
from waiting import SOON_S

from megasharp.tasks.code import PREAMBLE, name_of, program_of, same_output, same_value


@each_case(
    ("text", "program"),
    [
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)"),
        ("```\nfirst\n```\nno, rather\n```python\nsecond\nmore\n```", "second\nmore"),
        ("print(1)", None),
        ("```python\nprint(1)", None),
        ("```python\n \n```", None),
        ("```python\n```", None),
        ("", None),
        ("```a\nx\n```\n```b\ny", ""),
    ],
)
def test_the_last_block_is_the_program(text: str, program: str | None) -> None:
    assert program_of(text) == (program or None)


def test_ten_megabytes_are_read_in_no_time() -> None:
    began = time.monotonic()
    assert program_of("`" * 10_000_000) is None
    assert program_of("x\n" * 5_000_000 + "```\nprint(1)\n```") == "print(1)"
    assert time.monotonic() - began < SOON_S


@each_case(
    ("expected", "printed", "same"),
    [
        ("5\n", "5", True),
        ("1 2\n3\n", "  1 2 \n3 \n\n", True),
        ("1.0", "1", True),
        ("0.10 2", "0.1 2.00", True),
        ("0.333333", "0.3333333", False),
        ("1 2", "1  2", True),
        ("yes", "yes", True),
        ("yes", "Yes", False),
        ("a b", "a  b", False),
        ("1\n2", "1 2", False),
        ("1", "", False),
        ("", "", True),
        ("", "x", False),
        ("nan", "nan", True),
        ("1", "sNaN", False),
        ("1e5", "100000", True),
        ("1", "1e999999999", False),
        ("1\n\n2", "1\n2", False),
    ],
)
def test_outputs(expected: str, printed: str, same: bool) -> None:
    assert same_output(expected, printed) is same


@each_case(
    ("expected", "value", "same"),
    [
        ("[1, 2]", [1, 2], True),
        ("[1, [2, 3]]", (1, (2, 3)), True),
        ("3", 3.0, True),
        ("true", True, True),
        ('{"a": [1]}', {"a": (1,)}, True),
        ('"x"', "x", True),
        ("null", None, True),
        ("[1, 2]", {1, 2}, False),
        ("[1, 2]", [2, 1], False),
        ("0.3", 0.1 + 0.2, False),
    ],
)
def test_values(expected: str, value: object, same: bool) -> None:
    assert same_value(expected, value) is same


def test_programs_that_differ_in_comments_have_one_name() -> None:
    assert name_of("a = 1\n\n# so\nprint(a) ") == name_of("a = 1\nprint(a)")
    assert name_of("a = 1") != name_of("a = 2")
    assert name_of("print('\ud800')")


def test_what_stands_before_a_program_runs() -> None:
    namespace: dict[str, object] = {}
    exec(PREAMBLE.replace("sys.setrecursionlimit", "len and "), namespace)
    assert {"List", "defaultdict", "heappush", "bisect_left", "math", "gcd"} <= namespace.keys()
    assert namespace["pow"] is pow and namespace["open"] is open
