"""A group's table: repeats averaged problem by problem, suites averaged with equal weight, intervals of the average."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megasharp.common.errors import UserError
from megasharp.evals.estimators import average_intervals
from megasharp.evals.result import averaged, save_group
from megasharp.evals.result_files import group_lines, load_figures
from tests.unit.evals.rule_engine import run, suite_of


def test_rows_and_their_average(tmp_path: Path) -> None:
    small, large = run(suite=suite_of(4, "s"), label="m", step=3), run(suite=suite_of(9, "l"), label="m", step=3)
    repeats = [small, run(suite=suite_of(4, "s"), seed=4), run(suite=suite_of(4, "s"), seed=5)]
    table = averaged("g", "a paper, Table 1", ["top_p"], {"small": repeats, "large": [large]}, seed=1)
    assert table.rows["small"].figures["pass@4"] == pytest.approx(np.mean([each.pass_at_k[4] for each in repeats]))
    assert table.rows["large"].figures["pass@4"] == pytest.approx(large.pass_at_k[4])
    middle = (table.rows["small"].figures["pass@4"] + table.rows["large"].figures["pass@4"]) / 2
    assert table.average.figures["pass@4"] == pytest.approx(middle)
    assert (table.average.problems, table.rows["large"].problems, table.step) == (13, 9, 3)
    bound = table.average.intervals["pass@4"]
    assert bound.low < middle < bound.high
    tree = json.loads(save_group(table, tmp_path).read_text())
    assert tree["average"]["intervals"]["pass@4"] == [bound.low, bound.high]
    assert (tree["group"], tree["ours"], tree["suites"]["large"]["problems"]) == ("g", ["top_p"], 9)
    with pytest.raises(UserError, match=r"a group; give the file of one of its suites: small\.json, large\.json"):
        load_figures(tmp_path / "g.json")
    assert [line.split()[0] for line in group_lines(table)] == ["g", "small", "large", "average"]


def test_suites_with_other_ks_share_what_both_have() -> None:
    one = run(suite=suite_of(4, "s"), ks=[1, 4])
    other = run(suite=suite_of(4, "l"), ks=[1, 10])
    table = averaged("g", "p", [], {"one": [one], "other": [other]}, seed=1)
    assert {name for name in table.average.figures if name.startswith("pass@")} == {"pass@1", "pass@n"}
    assert replace(table).rows["one"].figures["pass@4"] == one.pass_at_k[4]


def test_the_interval_of_an_average_has_the_variance_of_independent_suites() -> None:
    """Normal values: the average of two suites' means has the standard error sqrt(s1^2/n1 + s2^2/n2) / 2."""
    generator = np.random.default_rng(0)
    suites = [generator.normal(0.0, 1.0, size=(300, 1)), generator.normal(5.0, 3.0, size=(500, 1))]
    (bound,) = average_intervals(suites, seed=1, resamples=4000)
    error = np.sqrt(sum(values.var() / len(values) for values in suites)) / 2
    assert bound is not None
    assert bound.high - bound.low == pytest.approx(2 * 1.96 * error, rel=0.06)
    assert (bound.low + bound.high) / 2 == pytest.approx(np.mean([values.mean() for values in suites]), abs=0.1 * error)
