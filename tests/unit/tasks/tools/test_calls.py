"""Calls in a turn of the policy, well-formed and not."""

from __future__ import annotations

from cases import each_case
from tool_calls import HERMES, LLAMA3, Turn

from megasharp.tasks.tools.calls import Call, Malformed, json_calls


@each_case("turn", [*HERMES, *LLAMA3], ids=lambda turn: turn.text)
def test_calls_are_found_and_what_was_meant_as_one_is_told_apart(turn: Turn) -> None:
    found = json_calls(turn.text)
    assert [(call.name, call.arguments) for call in found if isinstance(call, Call)] == turn.calls
    assert sum(isinstance(call, Malformed) for call in found) == turn.malformed


def test_nesting_without_end_is_malformed() -> None:
    (found,) = json_calls("<tool_call>" + "[" * 100_000)
    assert isinstance(found, Malformed)
