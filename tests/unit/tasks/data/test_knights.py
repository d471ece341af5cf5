"""Knights and Knaves: made puzzles have one solution, by another way to look for it; read ones are checked."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from random import Random

import pytest
from cases import each_case
from waiting import HANG_S

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome
from megasharp.tasks.knights import (
    Statement,
    is_true,
    make_puzzle,
    puzzle_text,
    read_records,
    solutions,
    verify,
)

REPOSITORY = Path(__file__).parents[4]
GOOD = {"names": ["Alice", "Boris"], "statements": [["knave", 1], ["same", 0, 1]], "solution": [True, False]}


def as_python(statement: Statement) -> str:
    """The statement as an expression over k[0], k[1], ...: a second notion of what it means."""
    kind, *parts = statement
    if kind in ("knight", "knave"):
        return f"({'' if kind == 'knight' else 'not '}k[{parts[0]}])"
    if kind in ("same", "different"):
        return f"(k[{parts[0]}] {'==' if kind == 'same' else '!='} k[{parts[1]}])"
    inner = [as_python(part) for part in parts]
    if kind == "not":
        return f"(not {inner[0]})"
    operator = {"and": "and", "or": "or", "if": "<=", "iff": "=="}[str(kind)]
    return f"({f' {operator} '.join(inner)})"


@pytest.mark.timeout(60)
def test_statements_that_do_not_nest_make_no_puzzle() -> None:
    with pytest.raises(ValueError, match=r"depth 1 only say what somebody else is: .*; give 2 or more"):
        make_puzzle(Random(0), 3, depth=1)


@each_case("people", range(2, 9))
def test_made_puzzles_have_one_solution(people: int) -> None:
    rng = Random(people)
    kinds: set[str] = set()
    for _ in range(60):
        puzzle = make_puzzle(rng, people, depth=3)
        assert len(set(puzzle.names)) == len(puzzle.statements) == people
        checks = [as_python(statement) for statement in puzzle.statements]
        found = [
            k
            for k in product((False, True), repeat=people)
            if all(eval(check, {"k": k}) == k[place] for place, check in enumerate(checks))
        ]
        assert found == [puzzle.solution]
        kinds |= {str(statement[0]) for statement in puzzle.statements}
        form = ", ".join(f"{name} is a {'knight' if k else 'knave'}" for name, k in puzzle.answer.knights)
        assert verify(f"<answer>{form}</answer>", puzzle.answer).outcome is Outcome.CORRECT
    assert len(kinds) == 9


def test_puzzles_follow_the_seed_and_people_are_2_to_8() -> None:
    assert [make_puzzle(Random(1), 3) for _ in range(2)] == [make_puzzle(Random(1), 3)] * 2
    assert make_puzzle(Random(1), 3) != make_puzzle(Random(2), 3)
    for people in (1, 9):
        with pytest.raises(ValueError, match="2 to 8 people"):
            make_puzzle(Random(1), people)


def test_no_one_and_many_solutions() -> None:
    assert solutions([("knave", 0), ("knight", 0)]) == []
    assert len(solutions([("knight", 1), ("knight", 0)])) == 2
    assert is_true(("if", ("knave", 0), ("knight", 1)), (True, False))


def test_the_text(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    statements = [["knave", 1], ["iff", ["knight", 0], ["not", ["same", 1, 2]]], ["and", ["knight", 0], ["knight", 1]]]
    names = ["Clara", "David", "Elena"]
    path.write_text(json.dumps({"names": names, "statements": statements, "solution": [True, False, False]}))
    puzzle = read_records(path)[0].puzzle
    text = puzzle_text(puzzle)
    assert "You meet Clara, David and Elena." in text
    assert 'David says: "Clara is a knight if and only if (it is not true that David and Elena are the same)."' in text
    assert 'Elena says: "Clara is a knight and David is a knight."' in text


@each_case(
    ("change", "message"),
    [
        ({"names": ["Alice"]}, "'names' must be 2 to 8 different names"),
        ({"names": ["Alice", "alice"]}, "'names' must be 2 to 8 different names"),
        ({"names": ["Alice", "Bo ris"]}, "'names' must be single words"),
        ({"statements": [["knave", 1]]}, "'statements' must hold one statement for each"),
        ({"statements": [["knave", 2], ["same", 0, 1]]}, "is no statement about people 0 to 1"),
        ({"statements": [["liar", 1], ["same", 0, 1]]}, "is no statement"),
        ({"statements": [["knave", True], ["same", 0, 1]]}, "is no statement"),
        ({"statements": [["not"], ["same", 0, 1]]}, "is no statement"),
        ({"statements": [[], ["same", 0, 1]]}, "is no statement"),
        ({"solution": [True, True]}, "'solution' must be the only one"),
        ({"solution": None}, "'solution' must be the only one"),
        ({"statements": [["knight", 1], ["knight", 0]]}, "'solution' must be the only one"),
    ],
)
def test_a_bad_line_is_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({**GOOD, **change}) + "\n")
    with pytest.raises(UserError, match=f"bad.jsonl:1: .*{message}"):
        read_records(path)


def test_the_tool_writes_files_that_can_be_read_with_no_puzzle_in_two(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "make_knights_data.py"), "--out", str(tmp_path)]
    subprocess.run([*command, "--people", "3", "4", "--train", "100"], check=True, cwd=REPOSITORY, timeout=HANG_S)
    files = [read_records(tmp_path / f"{split}.jsonl") for split in ("train", "dev", "test")]
    assert [len(file) for file in files] == [100, 128, 256]
    seen = [record.puzzle.statements for file in files for record in file]
    assert len(set(seen)) == len(seen)
