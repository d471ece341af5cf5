"""Responses around programs, and answers in each shape."""

from __future__ import annotations

from megasharp.tasks.code import CallTest, CodeAnswer, StdinTest

SUM = CodeAnswer(stdin=(StdinTest("2 3\n", "5\n"), StdinTest("10 -4\n", "6\n")))
SMALLEST = CodeAnswer(function="smallest", calls=(CallTest(("[3, 1, 2]", "2"), "[1, 2]"), CallTest(("[]", "0"), "[]")))
ADD = CodeAnswer(
    function="add",
    setup="def twice(x):\n    return 2 * x\n",
    check="import numpy as np\n\ndef check(candidate):\n    assert candidate(2, 3) == 5\n"
    "    assert np.allclose(candidate(twice(0.5), y=2), 3.0)\n    assert candidate((1,), (2,)) == (1, 2)\n",
)


def response(program: str) -> str:
    return f"Thinking.\n```python\n{program}\n```\n"
