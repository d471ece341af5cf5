"""Tests of programming problems in the shapes that LiveCodeBench and DeepCoder have them, as `CodeAnswer`s.

A test is `{"input", "output", "testtype" or "type", ...}` with the type `stdin` or `stdin_stdout` (the default), or
`functional` or `function_call`; the function's name is in the test (`fn_name`), in its `metadata.func_name` or in
the row's. All tests at once, as TACO has them, are `{"inputs": [...], "outputs": [...], "fn_name": ...}`.
Arguments of a call are JSON texts, one a line, or a JSON list; what it must return is a JSON text or value. Read in
LiveCodeBench's code_generation.py and testing_util.py and in rllm's code_reward.py and prepare_deepcoder_data.py.
"""

from __future__ import annotations

import json

from megasharp.common.errors import UserError
from megasharp.tasks.code import CallTest, CodeAnswer, StdinTest
from megasharp.tasks.data_fields import Fields, absent
from megasharp.tasks.sets.data_set import LeftOut

NO_TESTS = LeftOut("it has no tests")
_CALLS = {"functional", "function_call"}
_STDIN = {"stdin", "stdin_stdout"}


def json_field(fields: Fields, key: str, where: str) -> object:
    """A field that holds JSON text, or already a list or object. Raises UserError where it is neither."""
    value = fields.get(key)
    if isinstance(value, list | dict):
        return value
    try:
        if not isinstance(value, str):
            raise ValueError("it must be JSON text")
        parsed: object = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: '{key}' holds no JSON ({error}){absent(fields, key)}") from error
    return parsed


def answer_of(tests: object, function: str, where: str) -> CodeAnswer | LeftOut:
    """Make a program's tests. `function` is the row's name of the function to call; a test's own name counts first.

    A row without tests is left out. Raises UserError, naming `where` and the test, for tests of another shape, calls
    without a name, and calls of several functions.
    """
    listed = _together(tests, where) if isinstance(tests, dict) else tests
    if not isinstance(listed, list):
        raise UserError(f"{where}: tests must be a list of tests, or an object with 'inputs' and 'outputs'")
    stdin: list[StdinTest] = []
    calls: list[tuple[tuple[str, ...], object]] = []
    names: set[str] = set()
    for number, test in enumerate(listed, start=1):
        place = f"{where}, test {number}"
        if not isinstance(test, dict) or not {"input", "output"} <= test.keys():
            raise UserError(f"{place}: a test must be an object with 'input' and 'output'")
        if _is_call(test, place):
            names.add(_function(test) or function)
            calls.append((_arguments(test["input"], place), test["output"]))
        else:
            stdin.append(StdinTest(_text(test["input"]), _text(test["output"])))
    if names and (len(names) > 1 or "" in names):
        raise UserError(f"{where}: calls need the name of one function, got {', '.join(sorted(names)) or 'none'}")
    if not stdin and not calls:
        return NO_TESTS
    values = [value for _, value in calls]
    # TACO puts a list around what a function returns. Its own judge takes either; here all values decide together.
    bare = [value[0] for value in values if isinstance(value, list) and len(value) == 1]
    values = bare if len(bare) == len(values) else values
    return CodeAnswer(
        stdin=tuple(stdin),
        function=names.pop() if names else "",
        calls=tuple(CallTest(given, _value(value, where)) for (given, _), value in zip(calls, values, strict=True)),
    )


def question_with_format(question: str, starter: str) -> str:
    """A question and how to answer it, by LiveCodeBench's words for problems with and without code to start from."""
    if starter:
        return (
            f"{question}\n\n### Format: You will use the following starter code to write the solution to the problem "
            f"and enclose your code within delimiters.\n```python\n{starter}\n```\n\n"
        )
    return (
        f"{question}\n\n### Format: Read the inputs from stdin solve the problem and write the answer to stdout (do "
        "not directly test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when the "
        "python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT.\n"
        "```python\n# YOUR CODE HERE\n```\n\n"
    )


def function_in(metadata: object) -> str:
    """The function that metadata names; empty where it names none."""
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def _together(tests: Fields, where: str) -> list[object]:
    """One test for each input, of TACO's columns."""
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UserError(f"{where}: 'inputs' and 'outputs' must be lists of one length")
    name = tests.get("fn_name")
    common = {"testtype": "functional", "fn_name": name} if name else {}
    return [{"input": given, "output": wanted, **common} for given, wanted in zip(inputs, outputs, strict=True)]


def _is_call(test: Fields, where: str) -> bool:
    kind = test.get("testtype") or test.get("type") or ("functional" if _function(test) else "stdin")
    if kind not in _CALLS | _STDIN:
        raise UserError(f"{where}: unknown type {kind!r}; known are {', '.join(sorted(_CALLS | _STDIN))}")
    return kind in _CALLS


def _function(test: Fields) -> str:
    name = test.get("fn_name")
    return name if isinstance(name, str) else function_in(test.get("metadata"))


def _arguments(given: object, where: str) -> tuple[str, ...]:
    if isinstance(given, list):
        return tuple(json.dumps(each) for each in given)
    return tuple(_value(line, where) for line in _text(given).split("\n"))


def _value(given: object, where: str) -> str:
    if not isinstance(given, str):
        return json.dumps(given)
    try:
        json.loads(given)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: an argument or value of a call is no JSON text ({error})") from error
    return given


def _text(value: object) -> str:
    """Standard input and output; some sets have them as lists of lines."""
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)
