"""Every data set, on a small file made by hand in its schema, as JSONL and as parquet.

Where the schemas are from is said, set by set, in `megasharp/tasks/sets/`; the files are in `files/sets/`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome
from megasharp.tasks.code import CallTest, CodeAnswer, CodeVerifier, StdinTest
from megasharp.tasks.math import MathAnswer
from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.sets import SETS
from megasharp.tasks.sets.load import load_set
from megasharp.tasks.sets.program_tests import answer_of
from megasharp.tasks.table import make_verifiers

FILES = Path(__file__).parents[1] / "files" / "sets"
# The programs below are ours.
JUDGES = {**make_verifiers({"instructions"}), "code": CodeVerifier(open_sandbox("none"), 60.0)}
SUM = "```python\nprint(sum(map(int, input().split())))\n```"
FIVE = "```python\nprint(5)\n```"
TAGGED = "<answer> 55 + 36 - 7 - 19 </answer>"

# For each set: its file or folder, how many problems that holds, the first one's id, and a right and a wrong answer.
EXAMPLES = {
    "deepscaler": ("deepscaler", 10, "deepscaler/0", r"\boxed{3}", r"\boxed{4}"),
    "dapo_math_17k": ("dapo_math_17k", 5, "dapo_math_17k/0", "Answer: 1", "Answer: 2"),
    "dapo_math_17k_en": ("dapo_math_17k_en", 4, "dapo_math_17k_en/0", r"\boxed{1}", r"\boxed{2}"),
    "dapo_en_math12k": ("dapo_en_math12k", 14, "dapo_en_math12k/dapo/0", r"\boxed{1}", r"\boxed{2}"),
    "math12k": ("math12k", 10, "math12k/0", r"\boxed{2}", r"\boxed{1}"),
    "math_train": ("math_train", 9, "math_train/0", r"\boxed{0}", r"\boxed{1}"),
    "math_levels_3to5": ("math_train", 5, "math_levels_3to5/2", r"\boxed{2}", r"\boxed{0}"),
    "lighteval_math": ("math_train", 9, "lighteval_math/0", r"\boxed{0}", r"\boxed{1}"),
    "gsm8k_math_level1": ("gsm8k_math_level1", 7, "gsm8k_math_level1/gsm8k/0", r"\boxed{1272}", r"\boxed{1}"),
    "gsm8k": ("gsm8k", 10, "gsm8k/0", "so #### 1,272", r"\boxed{572}"),
    "gsm8k_test": ("gsm8k", 10, "gsm8k_test/0", r"\boxed{1272}", r"\boxed{572}"),
    "countdown_3to4": ("countdown_3to4", 10, "countdown_3to4/0", TAGGED, "<answer>65</answer>"),
    "countdown_3": ("countdown_3to4", 4, "countdown_3/1", "<answer>(3+5)*7</answer>", "<answer>3</answer>"),
    "synlogic_easy": ("synlogic", 10, "synlogic_easy/0", r"\boxed{4}", r"\boxed{5}"),
    "synlogic_easy_validation": ("synlogic", 10, "synlogic_easy_validation/0", r"\boxed{4}", r"\boxed{5}"),
    "verl_math": ("verl_math", 10, "verl_math/0", r"\boxed{2}", r"\boxed{1}"),
    "deepcoder": ("deepcoder", 6, "deepcoder/primeintellect/0", SUM, "```python\nprint(6)\n```"),
    "math500": ("math500", 10, "math500/test/algebra/1.json", r"\boxed{1/3}", r"\boxed{2/3}"),
    "aime24": ("aime24", 10, "aime24/60", r"\boxed{201}", r"\boxed{200}"),
    "aime25": ("aime25", 10, "aime25/AIME2025-I/0", r"\boxed{070}", r"\boxed{71}"),
    "amc23": ("amc23", 10, "amc23/0", r"\boxed{27}", r"\boxed{28}"),
    "minerva": ("minerva", 10, "minerva/0", r"\boxed{1000}", r"\boxed{100}"),
    "olympiadbench": ("olympiadbench", 10, "olympiadbench/1607", r"\boxed{-1, 1}", r"\boxed{1}"),
    "arc_c": ("arc_c", 10, "arc_c/Hand_1", r"\boxed{B}", r"\boxed{A}"),
    "mmlu_pro": ("mmlu_pro", 10, "mmlu_pro/71", r"\boxed{B}", r"\boxed{C}"),
    "bbh": ("bbh", 28, "bbh/boolean_expressions/0", r"\boxed{False}", r"\boxed{True}"),
    "livecodebench": ("livecodebench", 2, "livecodebench/abc1_a", SUM, FIVE),
    "ifeval": ("ifeval", 3, "ifeval/1000", "two words", "two, words"),
    "humaneval_plus": (
        "humaneval_plus",
        10,
        "humaneval_plus/HumanEval/0",
        "```python\ndef add0(a, b):\n    return a + b\n```",
        "```python\ndef add0(a, b):\n    return 3\n```",
    ),
}
# What is cut out of a table far behind the rows of a small file, and BBH, of which two tasks are there.
FAR = {"countdown_3to4_test", "countdown_3_test"}


def place_of(name: str, tmp_path: Path) -> Path:
    """The set's file or folder; of BBH a folder in which the other tasks are there too, with a row each."""
    folder = FILES / EXAMPLES[name][0]
    if not folder.is_dir():
        return folder.with_suffix(".jsonl")
    copy = tmp_path / "files"
    shutil.copytree(folder, copy)
    for part in SETS[name].parts if name == "bbh" else ():
        if not list(copy.glob(f"{part.source.name}.*")):
            (copy / f"{part.source.name}.jsonl").write_text('{"input": "not", "target": "one"}\n')
    return copy


def as_parquet(place: Path, out: Path) -> Path:
    """The same rows, each file as a parquet file of its own."""
    if place.is_dir():
        out.mkdir()
        for file in place.glob("*.jsonl"):
            as_parquet(file, out / f"{file.stem}.parquet")
        for file in place.glob("*.json"):
            shutil.copy(file, out)
        return out
    rows = [json.loads(line) for line in place.read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out


def test_every_set_has_an_example_and_a_verifier() -> None:
    assert EXAMPLES.keys() | FAR == SETS.keys()
    assert {each.task for each in SETS.values()} <= JUDGES.keys()
    assert all(name == each.name for name, each in SETS.items())


@each_case("name", EXAMPLES)
def test_a_set(name: str, tmp_path: Path) -> None:
    _, count, identity, right, wrong = EXAMPLES[name]
    place = place_of(name, tmp_path)
    items = load_set(name, place).items
    first = items[0]
    assert (len(items), first.id, first.task) == (count, identity, SETS[name].task)
    assert JUDGES[first.task](right, first.answer).outcome is Outcome.CORRECT
    assert JUDGES[first.task](wrong, first.answer).outcome is not Outcome.CORRECT
    assert len({item.id for item in items}) == count
    parquet = as_parquet(place, tmp_path / ("parquet" if place.is_dir() else f"{place.stem}.parquet"))
    again = load_set(name, parquet).items
    assert [(i.id, i.text, i.answer, i.turns) for i in again] == [(i.id, i.text, i.answer, i.turns) for i in items]


@each_case("name", sorted(FAR))
def test_a_set_cut_out_of_a_table(name: str, tmp_path: Path) -> None:
    """Rows 327,680 to 328,703, as TinyZero has it: of a file that long, and none of a shorter one."""
    with pytest.raises(UserError, match=f"no problem of {name} \\(there are no rows\\)"):
        load_set(name, FILES / "countdown_3to4.jsonl")
    nums = [[1, 2, 3]] * 327_680 + [[4, 5, 6, 7], [4, 5, 6]] * 600
    table = pyarrow.table({"target": pyarrow.array([6] * len(nums)), "nums": pyarrow.array(nums)})
    pyarrow.parquet.write_table(table, tmp_path / "all.parquet")
    items = load_set(name, tmp_path / "all.parquet").items
    assert len(items) == (512 if "3_" in name else 1024)
    assert "[4, 5, 6]" in items[-1].text


# A field of each set that its rows cannot do without.
NEEDED = {
    "deepscaler": "answer",
    "dapo_math_17k": "reward_model",
    "dapo_math_17k_en": "solution",
    "math12k": "problem",
    "math_train": "level",
    "math_levels_3to5": "solution",
    "lighteval_math": "problem",
    "gsm8k": "answer",
    "gsm8k_test": "question",
    "countdown_3to4": "nums",
    "countdown_3": "target",
    "verl_math": "prompt",
    "synlogic_easy": "data_source",
    "synlogic_easy_validation": "extra_info",
    "math500": "unique_id",
    "aime24": "answer",
    "amc23": "answer",
    "olympiadbench": "final_answer",
    "arc_c": "choices",
    "mmlu_pro": "options",
    "livecodebench": "private_test_cases",
    "humaneval_plus": "entry_point",
    "ifeval": "instruction_id_list",
}


@each_case(("name", "field"), NEEDED.items())
def test_a_missing_field_is_named_with_those_there_are(name: str, field: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in place_of(name, tmp_path).read_text().splitlines()]
    renamed = [{("other" if key == field else key): value for key, value in row.items()} for row in rows]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, renamed)))
    with pytest.raises(
        UserError, match=rf"mine.jsonl:\d+.*'{field}'.*no field '{field}' here, only: .*other"
    ) as caught:
        load_set(name, path)
    assert "\n" not in str(caught.value)


@each_case(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "q", "answer": "72"}, "'answer' must end in '#### ' and a number"),
        ("gsm8k", {"question": 3, "answer": "#### 72"}, "'question' must be a non-empty string"),
        ("math_train", {"problem": "p", "solution": "s", "level": "hard"}, "must be Level 1 to Level 5, got 'hard'"),
        ("countdown_3", {"nums": [1, "2", 3], "target": 6}, "'nums' must be two or more positive integers"),
        ("olympiadbench", {"id": 1, "question": "q", "final_answer": [], "context": None}, "'final_answer' must be a"),
        (
            "olympiadbench",
            {"id": 1, "question": "q", "final_answer": ["2"], "context": 5},
            "'context' must be a string",
        ),
        (
            "humaneval_plus",
            {"task_id": "t", "prompt": "p", "entry_point": "f", "test": "assert f()"},
            "must define check",
        ),
        ("verl_math", {"prompt": [{"content": "q"}], "reward_model": "2"}, "'reward_model' must be an object, got '2'"),
        ("verl_math", {"prompt": [], "reward_model": {"ground_truth": "2"}}, "'prompt' must be a list of messages"),
        (
            "synlogic_easy",
            {"prompt": [{"content": "q"}], "data_source": "sudok", "extra_info": {"game_data_str": "{}"}},
            "no SynLogic task 'sudok'; is it sudoku",
        ),
        (
            "synlogic_easy",
            {"prompt": [{"content": "q"}], "data_source": "sudoku", "extra_info": {}},
            "extra_info: 'game_data_str' must be",
        ),
        ("deepcoder", {"problem": "p", "tests": "{"}, "'tests' holds no JSON"),
        ("deepcoder", {"problem": "p", "tests": '[{"input": "1"}]'}, "test 1: a test must be an object with"),
        ("deepcoder", {"problem": "p", "tests": '{"inputs": ["1"], "outputs": []}'}, "lists of one length"),
        (
            "deepcoder",
            {"problem": "p", "tests": '[{"input": "1", "output": "1", "type": "functional"}]'},
            "calls need the name of one function, got none",
        ),
        (
            "deepcoder",
            {"problem": "p", "tests": '[{"input": "1", "output": "1", "type": "odd"}]'},
            "unknown type 'odd'",
        ),
    ],
)
def test_a_wrong_row_is_one_line(name: str, row: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=f"mine.jsonl:1.*{message}") as caught:
        load_set(name, path)
    assert "\n" not in str(caught.value)


def test_minerva_in_its_source_s_own_form() -> None:
    """The solution's last box is the answer, and a solution without one is left out."""
    loaded = load_set("minerva", FILES / "minerva_solved.jsonl")
    assert [item.answer for item in loaded.items[:2]] == [MathAnswer("60"), MathAnswer("120")]
    assert loaded.left_out == {"its solution has no boxed answer": 1}


def test_what_is_left_out_is_counted() -> None:
    assert load_set("math_levels_3to5", FILES / "math_train.jsonl").left_out == {"another level": 5}
    assert load_set("dapo_math_17k", FILES / "dapo_math_17k.jsonl").left_out == {"a question that was there before": 5}
    assert load_set("dapo_math_17k_en", FILES / "dapo_math_17k.jsonl").left_out == {
        "not in English": 2,
        "a question that was there before": 4,
    }


@each_case(
    ("outputs", "expected"),
    [([[4], [10]], ["4", "10"]), ([[4], [1, 2]], ["[4]", "[1, 2]"]), ([[[4]], [[]]], ["[4]", "[]"]), ([4], ["4"])],
)
def test_a_list_around_every_value_of_a_problem_is_no_part_of_it(outputs: list[object], expected: list[str]) -> None:
    tests = [{"type": "function_call", "fn_name": "f", "input": [1], "output": value} for value in outputs]
    together = {"fn_name": "f", "inputs": [[1]] * len(outputs), "outputs": outputs}
    for each in (tests, together):
        answer = answer_of(each, "", "here")
        assert isinstance(answer, CodeAnswer) and [call.expected for call in answer.calls] == expected


def test_the_tests_of_programs_in_every_shape(tmp_path: Path) -> None:
    by_id = {item.id: item.answer for item in load_set("deepcoder", FILES / "deepcoder").items}
    assert by_id == {
        "deepcoder/primeintellect/0": CodeAnswer(stdin=(StdinTest("2 3\n", "5\n"),)),
        "deepcoder/primeintellect/1": CodeAnswer(function="add", calls=(CallTest(("2", "3"), "5"),)),
        "deepcoder/taco/0": CodeAnswer(stdin=(StdinTest("a\n", "aa\n"), StdinTest("b\n", "bb\n"))),
        "deepcoder/taco/1": CodeAnswer(function="double", calls=(CallTest(("2",), "4"), CallTest(("5",), "10"))),
        "deepcoder/lcbv5/0": CodeAnswer(stdin=(StdinTest("3\n1 2 3", "3"),)),
        "deepcoder/lcbv5/1": CodeAnswer(function="smallest", calls=(CallTest(("[3, 1, 2]", "2"), "[1, 2]"),)),
    }
    first, second = load_set("livecodebench", FILES / "livecodebench.jsonl").items
    # Public tests come first, then the private ones, which are encoded in the first row and JSON in the second.
    assert first.answer == CodeAnswer(stdin=(StdinTest("2 3\n", "5\n"), StdinTest("10 -3\n", "7\n")))
    assert second.answer == CodeAnswer(
        function="smallest", calls=(CallTest(("[3, 1, 2]", "2"), "[1, 2]"), CallTest(("[1]", "1"), "[1]"))
    )
    assert "class Solution" in second.text and "# YOUR CODE HERE" in first.text
