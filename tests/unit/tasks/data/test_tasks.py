"""Every task of the table: a small file by hand in its data set's schema, a prompt, and a verifier that knows it.

Files are in `files/`; each adapter's module cites where the schema comes from.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome
from megasharp.tasks import instructions, reasoning_gym
from megasharp.tasks.choice import ChoiceAnswer
from megasharp.tasks.code import CodeVerifier
from megasharp.tasks.math import MathAnswer
from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.table import TASKS, load_items, make_verifiers

FILES = Path(__file__).parent / "files"
GOLDEN = Path(__file__).parents[3] / "golden" / "tasks"
SHIPPED = Path(__file__).parents[4] / "examples" / "quickstart" / "data" / "dev.jsonl"

# For each task: its file, the first problem's id, and a right and a wrong response to it.
EXAMPLES = {
    "countdown": (SHIPPED, "countdown-dev-00000", None, "1+1"),
    "choice": (FILES / "choice.jsonl", "Hand_1", r"\boxed{B}", r"\boxed{(A)}"),
    "code": (
        FILES / "code.jsonl",
        "sum",
        "```python\nprint(sum(map(int, input().split())))\n```",
        "```python\nprint(5)\n```",
    ),
    "countdown_3": (
        FILES / "countdown_3to4.jsonl",
        "countdown_3to4-2",
        "<answer>(3+5)*7</answer>",
        "<answer>3</answer>",
    ),
    "countdown_3to4": (
        FILES / "countdown_3to4.jsonl",
        "countdown_3to4-1",
        "55+36 is 91</think> <answer> 55 + 36 - 7 - 19 </answer>",
        "<answer>55+36-7</answer>",
    ),
    "environment": (GOLDEN / "environment.yaml", "maze-test-00000", None, None),
    "form": (FILES / "form.jsonl", "form-1", "<think>2</think><answer>2</answer>", None),
    "instructions": (FILES / "instructions.jsonl", "1000", "two words", "two, words"),
    "knights": (
        FILES / "knights.jsonl",
        "k1",
        "<answer>Boris is a knave, Alice is a knight</answer>",
        "<answer>Boris is a knight, Alice is a knave</answer>",
    ),
    "knights_short": (FILES / "knights.jsonl", "k1", "10", "01"),
    "maze": (GOLDEN / "maze.jsonl", "maze-test-00000", None, None),
    "reasoning_gym": (
        FILES / "reasoning_gym.yaml",
        "chain_sum-1-00000",
        None,
        "<answer>no</answer>",
    ),
    "short_answer": (FILES / "short_answer.jsonl", "short_answer-1", "So the answer is False.", r"\boxed{True}"),
    "synlogic": (FILES / "synlogic.jsonl", "s1", r"<answer>\boxed{7}</answer>", r"<answer>\boxed{8}</answer>"),
    "tools": (FILES / "tools.yaml", "test/prealgebra/1.json", r"so \boxed{1/3}", r"so \boxed{2/3}"),
    "math": (FILES / "math.jsonl", "test/prealgebra/1.json", r"so \boxed{1/3}", r"so \boxed{2/3}"),
}

# The programs above are ours.
JUDGES = {
    **make_verifiers(),
    "code": CodeVerifier(open_sandbox("none"), 60.0),
    "instructions": instructions.verify,
    "reasoning_gym": reasoning_gym.verify,
}


def test_every_task_has_an_example_and_a_verifier() -> None:
    assert EXAMPLES.keys() == TASKS.keys()
    assert TASKS.keys() <= JUDGES.keys()


@each_case("task", sorted(TASKS))
def test_the_first_problem(task: str) -> None:
    path, identity, right, wrong = EXAMPLES[task]
    item = load_items(task, path)[0]
    assert (item.id, item.task, item.source) == (identity, task, path.name)
    if right is not None:
        assert JUDGES[item.task](right, item.answer).outcome is Outcome.CORRECT
    if wrong is not None:
        assert JUDGES[item.task](wrong, item.answer).outcome is Outcome.WRONG


def test_mathematics_is_asked_for_in_a_box() -> None:
    first, second = load_items("math", FILES / "math.jsonl")
    assert first.text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is $1 - \\frac{2}{3}$?\n"
        "Please reason step by step, and put your final answer within \\boxed{}.\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.answer == MathAnswer(r"\pm 2")


def test_choices_of_both_kinds() -> None:
    letters, numbers, many = load_items("choice", FILES / "choice.jsonl")
    assert "Which is a metal?\nOptions:\nA. salt\nB. iron\nC. sand\nD. wax\nPlease reason" in letters.text
    assert numbers.answer == ChoiceAnswer("3", ("1", "2", "3", "4"))
    assert (many.id, many.answer) == ("70", ChoiceAnswer("J", tuple("ABCDEFGHIJ")))
    assert "\nJ. nine\n" in many.text
    assert "N/A" not in many.text


def test_countdown_is_asked_for_as_tinyzero_does_and_by_the_count_of_numbers(tmp_path: Path) -> None:
    path = FILES / "countdown_3to4.jsonl"
    both, three = load_items("countdown_3to4", path), load_items("countdown_3", path)
    assert [item.id for item in both] == ["countdown_3to4-1", "countdown_3to4-2"]
    assert [(item.id, item.task) for item in three] == [("countdown_3to4-2", "countdown_3")]
    assert "Using the numbers [19, 36, 55, 7], create an equation that equals 65." in both[0].text
    assert both[0].text.endswith("Let me solve this step by step.\n<think>")
    four = tmp_path / "four.jsonl"
    four.write_text('{"nums": [1, 2, 3, 4], "target": 10}\n')
    with pytest.raises(UserError, match="no problem of 3 numbers in this data file"):
        load_items("countdown_3", four)


@each_case(
    ("task", "line", "message"),
    [
        ("math", '{"problem": "1+1?"}', "'answer' must be a non-empty string"),
        ("math", '{"problem": "", "answer": "2"}', "'problem' must be a non-empty string"),
        ("math", '{"problem": "1+1?", "answer": true}', "'answer' must be a non-empty string .*, got True"),
        ("math", '{"problem": 2, "answer": 2}', "'problem' must be a non-empty string .*; write it as text, \"2\""),
        ("countdown_3to4", '{"nums": [1, 2]}', "'target' must be a positive integer, got None"),
        ("countdown_3to4", '{"nums": [1], "target": 1}', "'nums' must be two or more positive integers"),
        ("short_answer", '{"input": "1+1?"}', "'target' must be a non-empty string"),
        ("form", '{"prompt": "?", "form": "poem"}', "'form' must be one of tags, box, got 'poem'"),
        ("choice", '{"question": "?", "answer": "A"}', "'choices' must be an object with the lists"),
        (
            "choice",
            '{"question": "?", "options": ["a", "b"], "answer": "C"}',
            "'answer' must be one of the labels A, B",
        ),
        (
            "choice",
            '{"question": "?", "options": ["a", "b"], "answer": 1}',
            "'answer' must be one of the labels A, B, got 1, which may count from 0 or from 1; write the label as text",
        ),
        (
            "choice",
            '{"question": "?", "choices": {"text": ["a", "b"], "label": ["A", "A"]}, "answerKey": "A"}',
            "'label' must name each option of 'text' once",
        ),
        ("math", "[]", "not a JSON object"),
        ("synlogic", '{"task": "sudoko", "prompt": "?", "game": {}}', "no SynLogic task 'sudoko'; is it sudoku"),
        ("synlogic", '{"task": "bbeh_nycc", "prompt": "?", "game": {}}', "SynLogic's task 'bbeh_nycc' has no checker"),
        ("synlogic", '{"task": "sudoku", "prompt": "?"}', "'game' must be an object with"),
        (
            "synlogic",
            '{"task": "kukurasu", "prompt": "?", "game": {"metadata": {"row_sums": [1]}}}',
            "'game' is no problem of kukurasu: metadata has no 'col_sums'",
        ),
    ],
)
def test_a_bad_line_is_named(task: str, line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n" + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"bad.jsonl:2: {message}"):
        load_items(task, path)


def test_ids_are_those_of_the_file_or_its_lines_and_appear_once(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"problem": "1+1?", "answer": "2"}\n{"id": 7, "problem": "1+2?", "answer": "3"}\n')
    assert [item.id for item in load_items("math", path)] == ["own-1", "7"]
    path.write_text('{"id": 7, "problem": "1+1?", "answer": "2"}\n{"id": 7, "problem": "1+2?", "answer": "3"}\n')
    with pytest.raises(UserError, match=r"own.jsonl: the id '7' appears twice"):
        load_items("math", path)
    path.write_text("\n")
    with pytest.raises(UserError, match="no problems in this data file; write lines with"):
        load_items("math", path)


def test_a_small_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    """But for the first seconds after it was written, when its time may stay the same."""
    file = tmp_path / "dev.jsonl"
    lines = SHIPPED.read_text().splitlines()[:2]
    file.write_text(lines[0])
    assert load_items("countdown", file)[0] is not load_items("countdown", file)[0]
    os.utime(file, (1.0, 1.0))
    first = load_items("countdown", file)
    assert load_items("countdown", file)[0] is first[0]
    first.clear()
    assert len(load_items("countdown", file)) == 1
    file.write_text(lines[1])
    os.utime(file, (2.0, 2.0))
    assert load_items("countdown", file)[0].id == "countdown-dev-00001"
