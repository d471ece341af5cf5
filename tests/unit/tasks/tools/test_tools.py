"""Tools: what a function becomes, what arguments are refused, and the answers of those that come with megasharp."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.tasks.tools.calculator import Calculator
from megasharp.tasks.tools.search import Search
from megasharp.tasks.tools.tool import FunctionTool, Tool, ToolError, check_arguments
from megasharp.tasks.tools.tool_environment import ToolEnvironment


def answer(tool: Tool, **arguments: Any) -> str:
    return asyncio.run(tool.call(arguments))


async def weather(city: str, days: int = 1) -> list[str]:
    """Say what the weather is.

    Args:
        city: Name of the city.
        days: Number of days.
    """
    return [city] * days


def test_a_function_is_a_tool() -> None:
    tool = FunctionTool(weather)
    assert tool.schema["function"] == {
        "name": "weather",
        "description": "Say what the weather is.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city."},
                "days": {"type": "integer", "description": "Number of days."},
            },
            "required": ["city"],
        },
    }
    assert answer(tool, city="Ulm", days=2) == "['Ulm', 'Ulm']"
    with pytest.raises(UserError, match="<lambda> is no tool: "):
        FunctionTool(lambda city: city)


@each_case(
    ("arguments", "told"),
    [
        ({"city": "Ulm"}, None),
        ({"city": "Ulm", "days": 2}, None),
        ({"days": 2}, "the argument 'city' is missing"),
        ({"city": "Ulm", "day": 2}, "no argument 'day'; there are: city, days"),
        ({"city": "Ulm", "days": "2"}, "'days' must be of type integer"),
        ({"city": "Ulm", "days": True}, "'days' must be of type integer"),
        ({"city": None}, "'city' must be of type string"),
    ],
)
def test_arguments_must_fit_the_schema(arguments: dict[str, Any], told: str | None) -> None:
    parameters = FunctionTool(weather).parameters
    if told is None:
        check_arguments(arguments, parameters)
    else:
        with pytest.raises(ToolError, match=told):
            check_arguments(arguments, parameters)


def test_further_rules_of_a_schema() -> None:
    parameters = {"properties": {"unit": {"type": ["string", "number"], "enum": ["m", 1], "nullable": True}}}
    check_arguments({"unit": "m"}, parameters)
    check_arguments({}, {})
    with pytest.raises(ToolError, match="must be one of 'm', 1"):
        check_arguments({"unit": "km"}, parameters)


def test_the_calculator_is_exact() -> None:
    calculator = Calculator()
    assert [answer(calculator, expression=text) for text in ("(3+5)*7/2", "-3+1", "7/2")] == ["28", "-2", "7/2"]
    for text, told in (("1/0", "division by zero"), ("2**9", "no expression"), ("__import__('os')", "no expression")):
        with pytest.raises(ToolError, match=told):
            answer(calculator, expression=text)


DOCUMENTS = [
    {"id": "a", "title": "Tin", "text": "A soft metal, and old."},
    {"id": "b", "text": "Tin and copper give bronze. " * 10},
    {"id": "c", "text": "The same words."},
    {"id": "d", "text": "The same words."},
]


@pytest.fixture
def documents(tmp_path: Path) -> str:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    return str(path)


def test_the_best_passages_are_found_and_those_alike_in_their_order(documents: str) -> None:
    search = Search(documents, passages=2, characters=27)
    assert answer(search, query="Is TIN a metal?").startswith(
        "[1] Tin\nA soft metal, and old.\n\n[2] b\nTin and copper give"
    )
    assert answer(search, query="bronze") == "[1] b\nTin and copper give bronze. ..."
    assert answer(search, query="same") == "[1] c\nThe same words.\n\n[2] d\nThe same words."
    assert answer(search, query='NEAR( "-lead" *') == "nothing was found", "words, whatever SQLite takes them for"
    with pytest.raises(ToolError, match="no words"):
        answer(search, query="?!")


def test_a_search_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tools: search: path: there is no file nowhere\.jsonl"):
        Search("nowhere.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"title": "Tin"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:1: 'text' must be a non-empty string"):
        answer(Search(str(bad)), query="tin")


def test_a_tool_that_cannot_be_closed_leaves_none_open() -> None:
    closed = []

    class Kept(Calculator):
        def __init__(self, name: str) -> None:
            self.name = name

        async def close(self) -> None:
            closed.append(self.name)
            if self.name == "first":
                raise OSError("it hangs")

    conversation = ToolEnvironment([Kept("first"), Kept("second")], "json", 4, 100)
    with pytest.raises(OSError, match="it hangs"):
        asyncio.run(conversation.close())
    assert closed == ["first", "second"]
