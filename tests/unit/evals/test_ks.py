"""Values of k as people write them."""

from __future__ import annotations

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.evals.suites import default_ks, parse_ks


@each_case(
    ("text", "values"),
    [
        ("1,4,16", (1, 4, 16)),
        ("8", (8,)),
        ("4, 1,4", (1, 4)),
        ("1,2,4,...,1024", tuple(2**power for power in range(11))),
        ("1,2,4,…,8", (1, 2, 4, 8)),
        ("1,2,3,...,6", (1, 2, 3, 4, 5, 6)),
        ("1,4,16,...,256", (1, 4, 16, 64, 256)),
        ("5,10,...,30", (5, 10, 15, 20, 25, 30)),
        ("1,64,128,192,...,512", (1, 64, 128, 192, 256, 320, 384, 448, 512)),
        ("1,2,4,...,32,100", (1, 2, 4, 8, 16, 32, 100)),
        ("1,2,4,...,16,24,32,...,48", (1, 2, 4, 8, 16, 24, 32, 40, 48)),
        ("2,4,...,6", (2, 4, 6)),
        ("1,2,4,...,8192", tuple(2**power for power in range(14))),
    ],
)
def test_values(text: str, values: tuple[int, ...]) -> None:
    assert parse_ks(text) == values


@each_case(
    ("text", "message"),
    [
        ("", "expected whole numbers"),
        ("1,x", "expected whole numbers"),
        ("0,1", "expected whole numbers from 1 on"),
        ("1,-2", "expected whole numbers"),
        ("1,²", "expected whole numbers"),
        ("1,2,4,...", "expected whole numbers"),
        ("1,...,8", "the dots need two growing values"),
        ("...,8", "the dots need two growing values"),
        ("1,2,4,...,3", "a larger one after"),
        ("1,2,4,...,1000", "neither a constant factor nor a constant difference leads from 2,4 to 1000"),
        ("1,2,...,16", "the dots may double or count; give a third value"),
        ("1,4,...,64", "the dots may double or count"),
        ("1,3,4,...,16", "neither"),
    ],
)
def test_what_is_no_list_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_ks(text)
    assert "\n" not in str(caught.value) and f"--k {text}" in str(caught.value)


def test_defaults_end_at_n() -> None:
    assert default_ks(64) == (1, 4, 16, 64)
    assert default_ks(100) == (1, 4, 16, 64, 100)
    assert default_ks(1) == (1,)
