"""A sweep's table from evaluations written by hand: means, differences of pairs, what is missing, and the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megasharp.common.errors import UserError
from megasharp.evals.crossed import adjusted, crossed
from megasharp.evals.estimators import average_intervals
from megasharp.evals.frontier import MethodRuns, distance
from megasharp.evals.result import EvalSetting, summarize
from megasharp.evals.result_files import save
from megasharp.evals.samples import ProblemResult
from megasharp.reporting.history import read_run
from megasharp.reporting.sweeps.grid import CaseConfig, Cell, ResultsConfig, SweepConfig
from megasharp.reporting.sweeps.line import above_line
from megasharp.reporting.sweeps.measured import MEAN, Measured, measure
from megasharp.reporting.sweeps.results import frame, line_markdown, markdown, rows, write_results

N = 4
KS = (1, 2, 4)


def problem(name: str, correct: int, samples: int = N) -> ProblemResult:
    wrong = samples - correct
    return ProblemResult(name, samples, correct, min(correct, 1), wrong, 0, 0, 0, N - samples, 40, 0, None)


def run(folder: Path, corrects: Sequence[int], *, step: int = 3, infra: str | None = None, suite: str = "dev") -> Path:
    """A run folder of `step` steps, evaluated after the last one; 100 tokens a step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(f"name: {folder.name}\nsteps: 3\n")
    lines = [f'{{"step": {s}, "time": 1.0, "time/step": 1.0, "rollout/tokens": 100}}\n' for s in range(1, 4)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    problems = [
        problem(f"p{i}", min(c, 3), 3) if f"p{i}" == infra else problem(f"p{i}", c) for i, c in enumerate(corrects)
    ]
    result = summarize(problems, EvalSetting(suite, folder.name, step, N, KS, 1.0, 1), seconds=1.0)
    save(result, folder / "evals" / f"step_{step:06d}")
    return folder


def pass_2(correct: int) -> float:
    """1 - C(4 - c, 2) / C(4, 2)."""
    return 1.0 - (4 - correct) * (3 - correct) / 12 if correct < 3 else 1.0


def test_means_over_runs_and_their_difference(tmp_path: Path) -> None:
    found = {
        "plain": [measure(read_run(run(tmp_path / "a", [0, 2, 4])), ["dev"], 1)],
        "other": [
            measure(read_run(run(tmp_path / "b", [1, 2, 4])), ["dev"], 1),
            measure(read_run(run(tmp_path / "c", [4, 4, 4])), ["dev"], 2),
        ],
    }
    plain, other = rows(found, "plain")
    assert plain.difference == {} and (plain.seeds, other.seeds) == ((1,), (1, 2))
    assert plain.figures["pass@1"].mean == pytest.approx(0.5)
    assert plain.figures["pass@2"].mean == pytest.approx(np.mean([pass_2(c) for c in (0, 2, 4)]))
    assert plain.figures[MEAN].mean == pytest.approx(np.mean([plain.figures[f"pass@{k}"].mean for k in KS]))
    of_both = other.figures["pass@1"]
    assert (of_both.lowest, of_both.highest) == (pytest.approx(7 / 12), 1.0)
    assert of_both.mean == pytest.approx((7 / 12 + 1) / 2)
    # One run on a side: the interval is over problems alone, each with its mean over runs.
    moved = other.difference["pass@1"]
    assert moved.crossed is None and other.compared == "2 and 1"
    assert moved.mean == pytest.approx((7 / 12 + 1) / 2 - 0.5)
    assert 0.0 <= moved.interval.low <= moved.mean <= moved.interval.high <= 0.625


def test_a_problem_that_one_run_left_out_counts_by_the_others(tmp_path: Path) -> None:
    runs = [
        measure(read_run(run(tmp_path / "a", [0, 4, 4], infra="p0")), ["dev"], 1),
        measure(read_run(run(tmp_path / "b", [2, 4, 4])), ["dev"], 2),
    ]
    assert np.isnan(runs[0].figures["pass@1"][0])
    (row,) = rows({"a": runs}, None)
    assert row.figures["pass@1"].mean == pytest.approx((1.0 + (0.5 + 1 + 1) / 3) / 2)


def test_runs_on_other_problems_are_refused(tmp_path: Path) -> None:
    one = measure(read_run(run(tmp_path / "a", [0, 1])), ["dev"], 1)
    two = measure(read_run(run(tmp_path / "b", [0, 1, 2])), ["dev"], 1)
    with pytest.raises(UserError, match="different problems"):
        rows({"a": [one], "b": [two]}, None)


def test_a_run_without_the_evaluation_is_named(tmp_path: Path) -> None:
    history = read_run(run(tmp_path / "a", [0, 1]))
    with pytest.raises(UserError, match=r"no evaluation on dev before the first step \(eval.at_start\)"):
        measure(history, ["dev"], 1, first=True)
    with pytest.raises(UserError, match="no evaluation on test after step 3"):
        measure(history, ["test"], 1)


def some(folder: Path, name: str, counts: dict[int, list[int]]) -> list[Measured]:
    """The runs of a row by seed."""
    return [measure(read_run(run(folder / f"{name}{seed}", each)), ["dev"], seed) for seed, each in counts.items()]


def test_differences_are_crossed_and_bold_by_one_rule(tmp_path: Path) -> None:
    """Bold after Holm's correction only; pairs where all seeds are the same; one run is never bold."""
    low, high = [0, 1, 2, 3] * 8, [1, 2, 3, 4] * 8
    near = [0, 1, 2, 4] * 8
    found = {
        "plain": some(tmp_path, "a", {1: low, 2: near, 3: low}),
        "better": some(tmp_path, "b", {1: high, 2: [4, *high[1:]], 3: high}),
        "open": some(tmp_path, "c", {1: high, 2: low, 3: near}),
        "others": some(tmp_path, "d", {4: low, 5: near}),
        "alone": some(tmp_path, "e", {1: high}),
    }
    table = rows(found, "plain")
    assert [row.compared for row in table] == ["", "3 pairs", "3 pairs", "2 and 3", "1 and 3"]
    plain, better, others = (
        np.stack([one.figures["pass@1"] for one in found[name]]) for name in ("plain", "better", "others")
    )
    for row, expected in (
        (table[1], crossed(plain, better, paired=True)),
        (table[3], crossed(plain, others, paired=False)),
    ):
        difference = row.difference["pass@1"].crossed
        assert difference is not None and expected is not None and difference.interval() == expected.interval()
    text = markdown(table, [1, 4], "plain")
    assert "| `plain` | 3 | 0.396 [" in text and "**+0." not in text.split("Minus")[0]
    cells = {
        line.split("`")[1]: line.split(" | ")[2]
        for line in text.split("Minus")[1].splitlines()
        if line.startswith("| `")
    }
    assert cells["better"].startswith("**+0.23") and "]**<br>[" in cells["better"]
    assert not any("**" in cells[name] for name in ("open", "others", "alone"))
    assert cells["alone"].startswith("+0.22") and "<br>" not in cells["alone"] and "One run on a side, `alone`" in text
    assert list(frame(found)["pass@1"])[:2] == [0.375, 0.4375]


def test_bold_counts_all_rows_of_a_column(tmp_path: Path) -> None:
    """Of rows whose intervals exclude zero by themselves, some do not after the correction."""
    rng = np.random.default_rng(3)
    low = [[int(each) for each in rng.integers(0, 4, 40)] for _ in range(3)]

    def above(gain: float) -> dict[int, list[int]]:
        return {seed: [min(4, c + (rng.random() < gain)) for c in low[seed]] for seed in range(3)}

    found = {"plain": some(tmp_path, "plain", dict(enumerate(low)))}
    found |= {
        f"gain{gain}": some(tmp_path, f"gain{gain}", above(gain)) for gain in (0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.9)
    }
    table = rows(found, "plain")[1:]
    differences = [row.difference["pass@1"].crossed for row in table]
    p = [float(each.p_value()) for each in differences if each is not None]
    corrected = adjusted(p)
    lines = markdown(rows(found, "plain"), [1], "plain").split("Minus")[1].splitlines()
    cells = [line.split(" | ")[2] for line in lines if line.startswith("| `")]
    assert [cell.startswith("**") for cell in cells] == [one <= 0.05 for one in corrected]
    assert min(corrected) <= 0.05
    assert any(one <= 0.05 < after for one, after in zip(p, corrected, strict=True)), (p, corrected)


def test_rows_are_compared_at_equal_pass_at_1(tmp_path: Path) -> None:
    """Of the seeds and problems that all sides have; a row below the line's pass@1, or of one seed, has no distance."""
    base, fast = [1, 1, 2, 0] * 8, [4, 0, 3, 0] * 8
    found = {
        "base": some(tmp_path, "base", {1: base, 2: [2, 2, *base[2:]], 3: [0, 3, *base[2:]]}),
        "fast": some(tmp_path, "fast", {1: fast, 2: [3, *fast[1:]], 3: [4, 2, *fast[2:]]}),
        "mine": some(tmp_path, "mine", {2: [2, 2, 2, 1] * 8, 3: [2, 2, 1, 2] * 8, 4: [2, 1, 2, 2] * 8}),
        "weak": some(tmp_path, "weak", {1: [1, 0, 0, 0] * 8, 2: [1, 0, 0, 0] * 8}),
        "alone": some(tmp_path, "alone", {1: fast}),
    }
    found["fast"][1].figures["pass@2"][5] = np.nan
    by_seed = {name: {one.seed: one.figures for one in runs} for name, runs in found.items()}
    line = ["base", "fast"]
    above = above_line(by_seed, line, "pass@2")
    assert {name: (seeds, one is None) for name, (seeds, one) in above.items()} == {
        "mine": (2, False),
        "weak": (2, True),
        "alone": (1, True),
    }

    def runs_of(name: str) -> MethodRuns:
        figures = [[by_seed[name][seed][each] for seed in (2, 3)] for each in ("pass@1", "pass@2")]
        x_RP, y_RP = (np.delete(np.stack(each), 5, axis=1) for each in figures)
        return MethodRuns(name, x_RP, y_RP)

    one, expected = above["mine"][1], distance(runs_of("mine"), [runs_of(name) for name in line])
    assert one is not None and expected is not None and one.between == expected.between
    assert float(one.crossed.difference) == pytest.approx(float(expected.crossed.difference))
    assert one.crossed.interval().low == pytest.approx(expected.crossed.interval().low)
    text = line_markdown(found, line, [1, 2, 4])
    cell = f"{float(one.crossed.difference):+.3f} [{one.crossed.interval().low:+.3f}"
    assert "above the line of `base`, `fast`." in text and "|  | seeds | pass@2 | pass@4 |" in text
    assert f"| `mine` | 2 | {cell}" in text.replace("**", "") and "<br>`base` to `fast`" in text
    assert "| `weak` | 2 |  |  |" in text and "| `alone` | 1 |  |  |" in text
    assert line_markdown(found, [*found], [1, 2]) == line_markdown(found, line, [1]) == ""


def test_several_suites_are_averaged_with_equal_weight(tmp_path: Path) -> None:
    """Suites of 16 and of 8 problems: pass@1 of a half and of nothing is a quarter, not a third."""
    half, none, some_of_it = [0, 4, 2, 2] * 4, [0] * 8, [4, 0, 0, 0] * 2
    found: dict[str, list[Measured]] = {}
    for name, small in (("plain", none), ("other", some_of_it)):
        for seed in (1, 2, 3):
            folder = run(run(tmp_path / f"{name}{seed}", half), small, suite="test")
            found.setdefault(name, []).append(measure(read_run(folder), ["dev", "test"], seed))
    one = found["plain"][0]
    assert one.sizes == (16, 8) and len(one.problems) == 24
    assert one.means()["pass@1"] == pytest.approx(0.25) and one.means()["pass@4"] == pytest.approx(0.375)
    plain, other = rows(found, "plain")
    first = plain.figures["pass@1"]
    assert (first.mean, first.lowest, first.highest) == pytest.approx((0.25, 0.25, 0.25))
    (expected,) = average_intervals([np.array([[0.0], [1.0], [0.5], [0.5]] * 4), np.zeros((8, 1))], seed=1)
    assert first.interval == expected
    moved = other.difference["pass@1"].crossed
    assert moved is not None and float(moved.difference) == pytest.approx(0.125) and moved.problem_count == 8
    # The first suite does not differ; the second's problems differ by 1 and 0, 0, 0: 3/14 over 8, and a quarter of it.
    assert float(moved.problems) == pytest.approx(3 / 14 / 8 / 4)
    assert list(frame(found)["pass@1"]) == pytest.approx([0.25] * 3 + [0.375] * 3)
    found["plain"][0] = measure(read_run(tmp_path / "plain1"), ["test", "dev"], 1)
    with pytest.raises(UserError, match="different problems"):
        rows(found, None)


def test_the_table_names_the_suites_that_it_averages(tmp_path: Path) -> None:
    results = ResultsConfig(suite=["dev", "test"], k=[1, 4])
    config = SweepConfig(name="study", run="run.yaml", cases={"plain": CaseConfig()}, results=results)
    cell = Cell("plain_s1", "plain", "plain", 1, {})
    folder = run(run(tmp_path / "plain_s1", [0, 4]), [0, 0, 0, 0], suite="test")
    text, _ = write_results(config, [cell], {cell: folder}, tmp_path / "out")
    assert text.startswith("study on dev + test: average of 2 suites, mean over runs") and "| 0.250 [" in text
    only = config.model_copy(update={"results": ResultsConfig(k=[1, 4])})
    with pytest.raises(UserError, match=r"results.suite: say which; .* was evaluated on dev, test"):
        write_results(only, [cell], {cell: folder}, tmp_path / "out")


def test_a_part_of_the_runs_is_told_and_written(tmp_path: Path) -> None:
    import pandas as pd

    config = SweepConfig(
        name="study",
        run="run.yaml",
        seeds=[1, 2],
        cases={"plain": CaseConfig()},
        results=ResultsConfig(k=[1, 4], before="plain", line=["plain"]),
    )
    cells = [Cell(f"plain_s{seed}", "plain", "plain", seed, {}) for seed in (1, 2)]
    folder = run(tmp_path / "plain_s1", [0, 2, 4])
    run(tmp_path / "plain_s1", [1, 1, 1], step=0)
    text, paths = write_results(config, cells, {cells[0]: folder}, tmp_path / "out")
    assert text.startswith("**Partial: 1 of 2 runs are finished.**")
    assert [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| `")] == ["`base`", "`plain`"]
    assert [path.name for path in paths] == ["results.md", "results.csv", "pass_at_k.png", "frontier.png"]
    table = pd.read_csv(paths[1])
    assert list(table["row"]) == ["base", "plain"] and list(table["tokens"]) == [0, 300]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    other = config.model_copy(update={"results": ResultsConfig(k=[1, 8])})
    with pytest.raises(UserError, match=r"study: results.k: 8 was not measured \(eval.k\); there is 1, 2, 4"):
        write_results(other, cells, {cells[0]: folder}, tmp_path / "out")
    with pytest.raises(UserError, match="study: none of its 2 runs is finished"):
        write_results(config, cells, {}, tmp_path / "out")
