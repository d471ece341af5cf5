"""The study of solution multiplicity: its suites and data are what its README says they are."""

from __future__ import annotations

from pathlib import Path

from cases import each_case

from megasharp.evals.suites import load_suite
from megasharp.reporting.sweeps.grid import cells, load_sweep
from megasharp.tasks import countdown, knights
from megasharp.tasks.countdown import count_solutions
from megasharp.tasks.knights import solutions
from megasharp.tasks.table import load_items
from megasharp.tasks.tokenizer import load_tokenizer

REPOSITORY = Path(__file__).parents[3]
STUDY = REPOSITORY / "examples" / "solution_multiplicity"


@each_case("task", ["knights", "countdown_3", "countdown_4"])
def test_suites_have_256_problems(task: str) -> None:
    suite = load_suite(str(STUDY / "suites" / f"multiplicity_{task}.yaml"))
    assert len(suite.items) == 256


def test_puzzles_have_one_solution_and_none_is_in_two_files() -> None:
    files = [knights.read_records(STUDY / "data" / "knights" / f"{split}.jsonl") for split in ("dev", "test", "train")]
    puzzles = [record.puzzle for records in files for record in records]
    assert len({puzzle.statements for puzzle in puzzles}) == len(puzzles) == 128 + 256 + 1200
    assert all(len(puzzle.names) == 3 and len(solutions(puzzle.statements)) == 1 for puzzle in puzzles)


def test_countdown_problems_have_three_numbers_and_as_many_solutions_as_they_say() -> None:
    folder = STUDY / "data" / "countdown_3"
    files = [countdown.read_records(folder / f"{split}.jsonl") for split in ("dev", "test", "train")]
    records = [record for records in files for record in records]
    assert len({(tuple(sorted(record.numbers)), record.target) for record in records}) == len(records)
    assert {len(record.numbers) for record in records} == {3}
    for record in files[1][::16]:
        assert record.solutions == count_solutions(record.numbers, record.target)


def test_the_base_model_knows_every_sign_of_the_puzzles() -> None:
    tokenizer = load_tokenizer(STUDY / "knights_base")
    for item in load_items("knights_short", STUDY / "data" / "knights" / "test.jsonl"):
        assert tokenizer.decode(tokenizer.encode(item.text)) == item.text
        assert len(tokenizer.encode(item.text)) <= 32


@each_case("grid", sorted(path.stem for path in STUDY.glob("[ckt]*.yaml")))
def test_every_grid_is_one(grid: str) -> None:
    """Nine runs of three methods and seeds, or the twelve that their settings were chosen by."""
    file = STUDY / f"{grid}.yaml"
    config = load_sweep(file)
    assert len(cells(config, file)) == (12 if grid.startswith("tune_") else 9)
    assert list(config.cases) == ["grpo", "bonus", "penalty"]


STRATA = {"1": (1, 1), "2-3": (2, 3), "4-8": (4, 8), "over_8": (9, 10_000)}


@each_case("stratum", list(STRATA))
def test_strata_differ_in_solutions_alone(stratum: str) -> None:
    """Four numbers each, no problem in two files, and as many solutions as the stratum's name says."""
    low, high = STRATA[stratum]
    folder = STUDY / "data" / "strata" / stratum
    files = [countdown.read_records(folder / f"{split}.jsonl") for split in ("dev", "test", "train")]
    assert [len(records) for records in files] == [128, 256, 1000]
    records = [record for records in files for record in records]
    assert len({(tuple(sorted(record.numbers)), record.target) for record in records}) == len(records)
    assert {len(record.numbers) for record in records} == {4}
    for record in files[1][::32]:
        assert low <= count_solutions(record.numbers, record.target) == record.solutions <= high
    name = "strata_" + stratum.replace("-", "_to_")
    sweep = STUDY / f"{name}.yaml"
    assert len(cells(load_sweep(sweep), sweep)) == 25
    assert len(load_suite(str(STUDY / "suites" / f"{name}.yaml")).items) == 256
