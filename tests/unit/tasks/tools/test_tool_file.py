"""Problems with tools: their file, their prompts, and conversations."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from cases import each_case
from chat_models import TOOL_TEMPLATES, write_tokenizer

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome
from megasharp.tasks.environment import Observation
from megasharp.tasks.judge import TaskItem, digest_of
from megasharp.tasks.stream import read_prompt
from megasharp.tasks.table import load_items
from megasharp.tasks.tokenizer import load_tokenizer
from megasharp.tasks.tools.tool_file import ToolAnswer, verify

OWN = '''
from megasharp.tasks.tools.tool import Tool, ToolError


def height(mountain: str) -> int:
    """Say how high a mountain is.

    Args:
        mountain: Its name.
    """
    if mountain == "K2":
        raise RuntimeError("the book is lost")
    if mountain != "Brocken":
        raise ToolError("unknown mountain")
    return 1141


class Counter(Tool):
    name, description, parameters = "count", "Count calls.", {"type": "object", "properties": {}}

    def __init__(self, start=0):
        self.calls = start

    async def call(self, arguments):
        self.calls += 1
        return str(self.calls)


class NoTool:
    pass
'''
SUM = '{"expression": "1141+1"}'
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "sums.jsonl").write_text('{"id": "s", "problem": "1141+1?", "answer": "1142"}\n')
    (tmp_path / "digits.jsonl").write_text('{"id": "c", "numbers": [3, 8], "target": 24}\n')
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "tools.yaml"
    path.write_text(text.format(folder=folder))
    return path


def item_of(folder: Path, text: str) -> TaskItem:
    (item,) = load_items("tools", written(folder, text))
    assert isinstance(item.answer, ToolAnswer)
    return item


def answers(item: TaskItem, *actions: str) -> list[Observation]:
    assert isinstance(item.answer, ToolAnswer)
    environment, row = item.answer.environment(), item.answer.row

    async def play() -> list[Observation]:
        await environment.reset(row)
        return [await environment.step(action) for action in actions]

    return asyncio.run(play())


MATH = "task: math\npath: sums.jsonl\ntools: [calculator, {{use: '{folder}/own.py:height'}}]\n"


def test_the_schemas_are_in_the_prompt(folder: Path, tmp_path: Path) -> None:
    item = item_of(folder, MATH + "system: Use them.\n")
    qwen = load_tokenizer(write_tokenizer(tmp_path / "qwen", "qwen"))
    with pytest.raises(UserError, match="its chat template leaves out the tools calculator, height"):
        read_prompt(item, qwen)
    qwen.backend.chat_template = TOOL_TEMPLATES["qwen2.5"]
    text = read_prompt(item, qwen).text
    assert text.startswith("<|im_start|>system\nUse them.") and '"description": "Its name."' in text
    assert "1141+1?\nPlease reason step by step" in text and text.endswith("<|im_start|>assistant\n")
    without = load_tokenizer(write_tokenizer(tmp_path / "base", "qwen", chat=False))
    with pytest.raises(UserError, match="without a chat template no prompt says which tools there are"):
        read_prompt(item, without)


def test_each_call_is_answered_and_a_turn_without_one_is_judged_by_the_problem_s_task(folder: Path) -> None:
    item = item_of(folder, MATH + "calls: 2\ncharacters: 12\n")
    height = CALL % ("height", '{"mountain": "Brocken"}')
    found = answers(
        item,
        f"I look it up.\n{height}",
        f"<think>{height}</think>{CALL % ('calculator', SUM)}\n{height}\n{height}\n{height}",
        "\n".join(
            [CALL % ("height", '{"mountain": "Zugspitze"}'), CALL % ("depth", "{}")],
        ),
        CALL % ("height", "[]") + "<tool_call>",
        CALL % ("calculator", json.dumps({"expression": "10**99"})),
        CALL % ("calculator", json.dumps({"expression": "99999*99999*99999"})),
        r"So \boxed{1142}.",
    )
    assert [[text for _, text in one.messages] for one in found] == [
        ["1141"],
        ["1142", "1141", "error: at most 2 calls a turn are answered"],
        ["error: unknown mountain", "error: there is no tool 'depth'; there are: calculator, height"],
        ["error: a call's arguments must be an object", "error: a call must be JSON (Expecting value)"],
        ["error: no expression that can be worked out: expected a number or '(', found '*'"],
        ["999970000299 [cut here]"],
        [],
    ]
    assert all(role == "tool" for one in found for role, _ in one.messages)
    assert [one.done for one in found] == [False] * 6 + [True] and found[-1].info == {"judge": True}
    assert verify(r"So \boxed{1142}.", item.answer).outcome is Outcome.CORRECT
    with pytest.raises(RuntimeError, match="the book is lost"):
        answers(item, CALL % ("height", '{"mountain": "K2"}'))


def test_functions_and_documents_are_of_the_folder_of_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "documents.jsonl").write_text('{"id": "1", "text": "tin of nowhere"}\n')
    for name in ("first", "second"):
        own = folder / name
        own.mkdir()
        (own / "sums.jsonl").write_text((folder / "sums.jsonl").read_text())
        (own / "own_tools.py").write_text(f'def where() -> str:\n    """Say where."""\n    return "{name}"\n')
        (own / "documents.jsonl").write_text(f'{{"id": "1", "text": "tin of {name}"}}\n')
        tools = "[own_tools.py:where, {use: search, options: {path: documents.jsonl}}]"
        (own / "tools.yaml").write_text(f"task: math\npath: sums.jsonl\ntools: {tools}\n")
        item, *_ = load_items("tools", own / "tools.yaml")
        here, found = answers(item, CALL % ("where", "{}"), CALL % ("search", '{"query": "tin"}'))
        assert here.messages == (("tool", name),) and f"tin of {name}" in found.messages[0][1]


def test_each_conversation_has_tools_of_its_own(folder: Path) -> None:
    item = item_of(
        folder, "task: math\npath: sums.jsonl\ntools: [{{use: '{folder}/own.py:Counter', options: {{start: 4}}}}]\n"
    )
    for _ in range(2):
        one, two = answers(item, CALL % ("count", "{}"), CALL % ("count", "{}"))
        assert (one.messages, two.messages) == ((("tool", "5"),), (("tool", "6"),))


def test_the_short_notation(folder: Path) -> None:
    item = item_of(folder, "task: countdown\npath: digits.jsonl\ntools: [calculator]\nnotation: short\n")
    assert (item.text, item.turns, item.tools) == ("3 8=24:", (), "")
    found = answers(item, "?3*8", "?3/(8-8)", "?", "3*8")
    assert [(one.text, one.done) for one in found] == [("=24:", False), ("=!:", False), ("=!:", False), ("", True)]
    assert verify("3*8", item.answer).canonical_answer == "3*8"


def test_the_tools_are_part_of_a_digest(folder: Path) -> None:
    first = digest_of([item_of(folder, MATH)])
    assert digest_of([item_of(folder, MATH)]) == first
    assert digest_of([item_of(folder, MATH + "calls: 1\n")]) != first
    (folder / "own.py").write_text(OWN)
    assert digest_of([item_of(folder, MATH.replace("calculator, ", ""))]) != first


@each_case(
    ("text", "told"),
    [
        ("task: math\npath: sums.jsonl\ntools: []\n", "tools"),
        ("task: math\npath: sums.jsonl\ntools: [abacus]\n", "tools: use: 'abacus' must be written package.module:name"),
        ("task: math\npath: sums.jsonl\ntools: ['{folder}/own.py:NoTool']\n", "own.py:NoTool is no megasharp"),
        ("task: math\npath: sums.jsonl\ntools: ['{folder}/own.py:OWN']\n", "has no 'OWN'"),
        (
            "task: math\npath: sums.jsonl\ntools: [{{use: '{folder}/own.py:Counter', options: {{begin: 4}}}}]\n",
            'cannot be made with options ."begin": 4. .TypeError',
        ),
        (
            "task: math\npath: sums.jsonl\ntools: [{{use: '{folder}/own.py:height', options: {{a: 4}}}}]\n",
            "is a function, which has no options",
        ),
        ("task: math\npath: sums.jsonl\ntools: [calculator, calculator]\n", "two tools have one name"),
        ("task: math\npath: sums.jsonl\ntools: [{{use: python, options: {{sandbox: off}}}}]\n", "bubblewrap or none"),
        ("task: math\npath: sums.jsonl\ntools: [calculator]\nprompt: boxed_qwen\n", "boxed_qwen is no message"),
        (
            "task: countdown\npath: digits.jsonl\ntools: [calculator, '{folder}/own.py:height']\nnotation: short\n",
            "short is for one tool",
        ),
        ("task: code\npath: sums.jsonl\ntools: [calculator]\n", "answers of task code cannot be judged"),
        ("task: nothing\npath: sums.jsonl\ntools: [calculator]\n", "unknown task 'nothing'"),
    ],
)
def test_what_is_wrong_is_told(folder: Path, text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_items("tools", written(folder, text))
