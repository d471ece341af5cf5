"""Countdown problems: made ones are solvable, read ones are checked line by line, shipped ones are sound."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome
from megasharp.tasks.countdown import (
    CountdownAnswer,
    CountdownRange,
    count_solutions,
    make_problem,
    prompt_text,
    read_records,
    verify,
)

SHIPPED = Path(__file__).parents[4] / "examples" / "quickstart" / "data"
GOOD = '{"id": "a", "numbers": [3, 5, 7, 8], "target": 24, "solutions": 3}'


@each_case("count", [2, 3, 4, 5])
def test_made_problems_are_in_range_and_solved_by_their_solution(count: int) -> None:
    rng = Random(count)
    for problem in [make_problem(rng, count, CountdownRange(7, 30)) for _ in range(300)]:
        assert len(problem.numbers) == count
        assert all(1 <= number <= 7 for number in problem.numbers)
        assert 1 <= problem.target <= 30
        answer = CountdownAnswer(problem.numbers, problem.target)
        assert verify(problem.solution, answer).outcome is Outcome.CORRECT


def test_made_problems_use_every_operator_and_follow_the_seed() -> None:
    def draw(seed: int) -> list[str]:
        rng = Random(seed)
        return [make_problem(rng, 4).solution for _ in range(200)]

    assert draw(1) == draw(1) != draw(2)
    assert set("+-*/") <= set("".join(draw(1)))


def test_the_key_forgets_the_order_of_the_numbers() -> None:
    problem = make_problem(Random(0), 4)
    assert problem.key == (tuple(sorted(problem.numbers)), problem.target)


def test_prompt() -> None:
    assert prompt_text((3, 5, 7, 8), 24) == "3 5 7 8=24:"


def test_reading_a_file(tmp_path: Path) -> None:
    path = tmp_path / "good.jsonl"
    path.write_text(GOOD + "\n\n" + '{"id": "b", "numbers": [1, 2], "target": 3}' + "\n")
    first, second = read_records(path)
    assert (first.id, first.answer, first.solutions) == ("a", CountdownAnswer((3, 5, 7, 8), 24), 3)
    assert (second.id, second.answer, second.solutions) == ("b", CountdownAnswer((1, 2), 3), None)


@each_case(
    ("line", "message"),
    [
        ("{", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"numbers": [1, 2], "target": 3}', "'id' must be"),
        ('{"id": "\\ud83d", "numbers": [1, 2], "target": 3}', "of Unicode text"),
        ('{"id": 7, "numbers": [1, 2], "target": 3}', "'id' must be"),
        ('{"id": "b", "numbers": [1], "target": 1}', "'numbers' must be"),
        ('{"id": "b", "numbers": "12", "target": 3}', "'numbers' must be"),
        ('{"id": "b", "numbers": [1, 0], "target": 3}', "'numbers' must be"),
        ('{"id": "b", "numbers": [1, 2.0], "target": 3}', "'numbers' must be"),
        ('{"id": "b", "numbers": [1, true], "target": 3}', "'numbers' must be"),
        ('{"id": "b", "numbers": [1, 2]}', "'target' must be"),
        ('{"id": "b", "numbers": [1, 2], "target": true}', "'target' must be"),
        ('{"id": "b", "numbers": [1, 2], "target": 3, "solutions": -1}', "'solutions' must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(UserError, match=message) as caught:
        read_records(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)


def test_a_line_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(f"{GOOD}\n\n".encode() + b'{"id": "\xff", "numbers": [1, 2], "target": 3}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:3: not UTF-8 text \(invalid start byte at its byte 9\)"):
        read_records(path)


def test_only_the_ends_of_lines_end_them(tmp_path: Path) -> None:
    """JSON strings may hold Unicode's other separators."""
    path = tmp_path / "good.jsonl"
    path.write_bytes('{"id": "a\u2028b", "numbers": [1, 2], "target": 3}\r\n'.encode())
    assert [record.id for record in read_records(path)] == ["a\u2028b"]


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_records(tmp_path / "missing.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(UserError, match="no problems"):
        read_records(empty)
    empty.write_text(f"{GOOD}\n{GOOD}\n")
    with pytest.raises(UserError, match="'a' appears twice"):
        read_records(empty)


def test_shipped_splits_are_disjoint_and_hold_what_they_say() -> None:
    records = {split: read_records(SHIPPED / f"{split}.jsonl") for split in ("train", "dev", "test")}
    keys = {
        split: {(tuple(sorted(record.numbers)), record.target) for record in each} for split, each in records.items()
    }
    assert {split: len(each) for split, each in keys.items()} == {"train": 8000, "dev": 128, "test": 256}
    assert len(keys["train"] | keys["dev"] | keys["test"]) == 8000 + 128 + 256
    assert {len(record.numbers) for record in records["dev"] + records["test"]} == {4}
    assert {len(record.numbers) for record in records["train"]} == {3, 4}
    assert len({record.id for each in records.values() for record in each}) == 8384
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 1_500_000


def test_shipped_solution_counts_are_the_solvers() -> None:
    rng = Random(5)
    records = read_records(SHIPPED / "dev.jsonl")
    records += rng.sample(read_records(SHIPPED / "train.jsonl"), 60)
    for record in rng.sample(records, 80):
        assert record.solutions == count_solutions(record.numbers, record.target) > 0
    assert json.loads((SHIPPED / "dev.jsonl").read_text().splitlines()[0])["id"] == "countdown-dev-00000"
