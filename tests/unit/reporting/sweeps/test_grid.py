"""The runs of a sweep's file, and the content of their run files."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.core import dump_tree, read_tree
from megasharp.reporting.sweeps.grid import cells, load_sweep, nested

RUN = "name: one\nsteps: 3\nrecipe: {methods: [grpo], casp: {alpha: 0.5, topn: 2}}\nseed: 9\n"
GRID = """
name: study
run: run.yaml
seeds: [1, 2]
set: {steps: 7, policy.tp: 2}
axes: {policy.optimizer.lr: [1.0e-4, 0.002]}
cases:
  plain: {}
  casp:
    include: [piece.yaml]
    set: {recipe.methods: [grpo, casp]}
    axes: {recipe.casp.alpha: [0.01]}
"""


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "piece.yaml").write_text("recipe: {casp: {topn: 4, alpha: 0.9}}\nsteps: 5\n")
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    return path


def test_cases_times_axes_times_seeds_a_seed_together(grid: Path) -> None:
    found = [cell.name for cell in cells(load_sweep(grid), grid)]
    rows = ["plain-lr0.0001", "plain-lr0.002", "casp-lr0.0001-alpha0.01", "casp-lr0.002-alpha0.01"]
    assert found == [f"{row}_s{seed}" for seed in (1, 2) for row in rows]
    assert [cell.row for cell in cells(load_sweep(grid), grid)] == rows * 2


def test_a_run_file_is_the_run_then_pieces_then_keys_from_the_sweeps_to_the_axes(grid: Path, tmp_path: Path) -> None:
    cell = cells(load_sweep(grid), grid)[-1]
    file = tmp_path / "elsewhere" / "cell.yaml"
    file.parent.mkdir()
    file.write_text(dump_tree(cell.tree))
    assert read_tree(file) == {
        "name": "casp-lr0.002-alpha0.01_s2",
        "seed": 2,
        "steps": 7,
        "policy": {"tp": 2, "optimizer": {"lr": 0.002}},
        "recipe": {"methods": ["grpo", "casp"], "casp": {"alpha": 0.01, "topn": 4}},
    }


def test_a_sweep_may_have_neither_cases_nor_axes(grid: Path) -> None:
    grid.write_text("name: seeds\nrun: run.yaml\nseeds: [3, 4]\n")
    assert [cell.name for cell in cells(load_sweep(grid), grid)] == ["seeds_s3", "seeds_s4"]


def test_overrides_are_of_the_sweeps_own_keys(grid: Path) -> None:
    config = load_sweep(grid, ["seeds=[5]", "slurm.time='1:00:00'"])
    assert config.seeds == [5] and config.slurm.time == "1:00:00"


def test_dotted_keys_are_tables() -> None:
    assert nested({"a.b": 1, "a": {"c.d": 2}, "e": [3]}) == {"a": {"b": 1, "c": {"d": 2}}, "e": [3]}


@each_case(
    ("text", "words"),
    [
        ("seeds: [1]\n", "name: this key is required, and so is run"),
        ("name: a\nrun: none.yaml\n", "no file 'none.yaml'"),
        ("name: a\nrun: run.yaml\nseeds: [1, 1]\n", "seeds: [1, 1] names a seed twice"),
        ("name: a\nrun: run.yaml\naxes: {x: []}\n", "axes.x: expected non-empty list"),
        ("name: a\nrun: run.yaml\ncases: {b: {axes: {x: []}}}\n", "cases.b.axes.x: expected non-empty list"),
        ("name: a\nrun: run.yaml\naxes: {seed: [1, 2]}\n", "seed: each run has its own; write seeds"),
        ("name: a\nrun: run.yaml\ncases: {b: {set: {name: c}}}\n", "name: each run has its own"),
        ("name: a\nrun: run.yaml\ncases:\n  b: {}\n  b: {set: {x: 1}}\n", "'b' is written twice"),
        ("name: a\nrun: run.yaml\naxes: {x: [1, 1.0000001]}\n", "'x1_s1' would be the name of two runs"),
        ("name: a\nrun: run.yaml\naxes: {x: [{y: 1}]}\n", "cannot be a run's name"),
        (
            "name: a\nrun: run.yaml\ncases: {b: {sets: 1}}\n",
            "cases.b.sets: unknown key, nearest is set; known keys here: include",
        ),
        ("name: a\nrun: run.yaml\nslurm: {time: 1:00:00}\n", "slurm.time: YAML reads this as a number"),
        ("name: a\nrun: run.yaml\nresults: {against: grpo}\ncases: {b: {}}\n", "no case 'grpo'; cases: b"),
        ("name: a\nrun: run.yaml\nresults: {line: [b, grpo]}\ncases: {b: {}}\n", "line: no case 'grpo'; cases: b"),
        ("name: a\nrun: run.yaml\nresults: {suite: [x, y, x]}\n", "x would count twice in the average"),
    ],
)
def test_mistakes_are_one_line(grid: Path, text: str, words: str) -> None:
    grid.write_text(text)
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        cells(load_sweep(grid), grid)
    assert words in str(error.value)
