"""Two results compared: figures that follow from counts, boundaries crossed, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megasharp.cli.main import app
from megasharp.common.errors import UserError
from megasharp.evals.compare import Comparison, Crossing, Side
from megasharp.evals.compare import compare as compare_sides
from megasharp.evals.crossed import adjusted, crossed
from megasharp.evals.estimators import pass_at_k_mean
from megasharp.evals.result import EvalResult, EvalSetting, summarize
from megasharp.evals.result_files import load_result, save
from megasharp.evals.samples import Answers, ProblemResult
from megasharp.reporting.comparison import compare_results

FILES = (Path("A.json"), Path("B.json"))
KS = (1, 4, 16)


def row(problem: str, correct: int, n: int = 16, infra: int = 0) -> ProblemResult:
    wrong = n - infra - correct
    given = [(count, right) for count, right in ((correct, True), (wrong, False)) if count]
    answers = Answers(tuple(count for count, _ in given), tuple(right for _, right in given), ("a",), 0, 0)
    return ProblemResult(problem, n - infra, correct, min(correct, 1), wrong, 0, 0, 0, infra, 9 * n, 0, None, answers)


def result(counts: list[int], label: str = "m", **changes: object) -> EvalResult:
    rows = [row(f"p{number}", correct) for number, correct in enumerate(counts)]
    setting = EvalSetting("tiny", label, 0, 16, KS, 1.0, 3, identity={"problems": "abc"})
    return replace(summarize(rows, setting, 1.0), **changes)  # type: ignore[arg-type]


def compare(before: EvalResult, after: EvalResult, ks: Sequence[int], files: Sequence[Path]) -> Comparison:
    """Compare one result a side."""
    return compare_sides(Side([before], files[:1]), Side([after], files[1:]), ks)


BEFORE = [0, 1, 2, 4, 8, 0, 1, 3, 6, 2]
AFTER = [0, 0, 8, 8, 16, 0, 0, 12, 16, 0]


def test_differences_and_samples_needed_follow_from_the_counts() -> None:
    found = compare(result(BEFORE, "base"), result(AFTER, "tuned"), KS, FILES)
    by_name = {each.name: each for each in found.differences}
    for k in KS:
        one, other = pass_at_k_mean(BEFORE, 16, k), pass_at_k_mean(AFTER, 16, k)
        assert (by_name[f"pass@{k}"].before, by_name[f"pass@{k}"].after) == pytest.approx((one, other))
        interval = by_name[f"pass@{k}"].interval
        assert interval.low <= other - one <= interval.high
        need = next(each for each in found.needed if each.k == k)
        reached = [i for i in range(1, 17) if pass_at_k_mean(AFTER, 16, i) >= one - 1e-12]
        assert need.needed == (reached[0] if reached else None)
    assert [need.needed for need in found.needed] == [1, 3, None]
    assert (found.before, found.after, found.problems, found.notes) == ("base step 0", "tuned step 0", 10, ())


def test_what_grows_with_the_number_of_samples_is_compared_at_the_same_one_only() -> None:
    one, other = result(BEFORE), result(AFTER, n=64)
    grow = {"pass@n", "answer_entropy", "distinct_correct"}
    assert grow <= {each.name for each in compare(one, result(AFTER), KS, FILES).differences}
    found = compare(one, other, KS, FILES)
    assert not grow & {each.name for each in found.differences} and "pass@4" in str(found.differences)
    assert any("pass@n, answer_entropy" in note and "left out" in note for note in found.notes)


def test_a_model_needs_as_many_samples_as_it_had() -> None:
    found = compare(result(BEFORE), result(BEFORE), (1, 3, 5, 16), FILES)
    assert [need.needed for need in found.needed] == [1, 3, 5, 16]
    assert all(each.interval.low == each.interval.high == 0.0 for each in found.differences)
    assert all(not crossing.gained and not crossing.lost for crossing in found.crossings)


def test_problems_cross_the_boundary_one_over_k() -> None:
    """Above 1/4 is more than 4 of 16, above 1/16 more than 1 of 16; nothing is above 1/1."""
    found = compare(result(BEFORE), result(AFTER), KS, FILES)
    four, sixteen = found.crossings
    assert (four.k, sixteen.k) == (4, 16)
    assert dict(four.gained) == {"p2": "2/16 to 8/16", "p3": "4/16 to 8/16", "p7": "3/16 to 12/16"} and not four.lost
    assert dict(sixteen.lost) == {"p9": "2/16 to 0/16"} and not sixteen.gained
    assert four.chance == 0.25 and sixteen.chance == 1.0
    one = Crossing(4, tuple((str(i), "") for i in range(9)), (("x", ""),))
    assert one.chance == pytest.approx(2 * 11 / 2**10)


def test_settings_that_differ_are_said_and_unscored_problems_left_out() -> None:
    rows = [row("p0", 4), row("p1", 3, infra=5), row("p2", 0)]
    setting = EvalSetting("tiny", "x", 0, 16, KS, 0.6, 3)
    other = replace(summarize(rows, setting, 1.0), label="other")
    found = compare(result([1, 2, 3]), other, KS, FILES)
    assert found.problems == 2
    assert found.notes == (
        "temperature differs: 1.0 and 0.6",
        "1 problems are left out: too few judged samples in one of the two",
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (result(BEFORE, suite="other"), "A.json is of suite tiny, B.json of other: nothing to compare"),
        (result(BEFORE[:8]), r"problem p8 and 1 more of suite tiny is in A\.json alone: other problems"),
        (result(BEFORE, identity={"problems": "xyz"}), "texts or answers differ under the same ids"),
    ],
)
def test_other_problems_are_refused(other: EvalResult, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(result(BEFORE), other, KS, FILES)


def test_the_command_says_all_of_it(tmp_path: Path) -> None:
    one = save(result(BEFORE, "base"), tmp_path / "a")
    other = save(result(AFTER, "tuned step 30", step=30), tmp_path / "b")
    said: list[str] = []
    compare_results(None, [one, other], [], None, True, said.append)
    text = "\n".join(said)
    assert "tiny, 10 problems: from base step 0 to tuned step 30" in text
    target = pass_at_k_mean(BEFORE, 16, 4)
    assert (
        f"pass@4 {target:.4f}: 3 (0.75 k) ({pass_at_k_mean(AFTER, 16, 3):.4f})" in text
        and "not with all its samples" in text
    )
    assert "1/4: 3 gained, 0 lost, chance 0.25" in text and "    gained p7: 3/16 to 12/16" in text
    quiet: list[str] = []
    compare_results(None, [one, other], [], "1,16", False, quiet.append)
    assert not any("p7" in line or "pass@4" in line for line in quiet)
    assert "none is marked" in text and "*" not in text
    for files, beside, k, message in (
        ([one, other, one], [], None, r"here are 3 and no --with"),
        ([], [one], None, "--with names the second side"),
        ([one, one], [other, other], None, "a/tiny.json is given twice"),
        ([one, tmp_path / "c.json"], [], None, "cannot read this evaluation"),
        ([one, other], [], "32", r"--k 32: .* has 16 samples per problem"),
    ):
        with pytest.raises(UserError, match=message):
            compare_results(None, files, beside, k, False, said.append)
    with pytest.raises(UserError, match="--compare takes result files"):
        compare_results(tmp_path, [one, other], [], None, False, said.append)


def runs(folder: Path, name: str, counts: dict[int, list[int]]) -> list[Path]:
    """Results in the run folders of seeds."""
    files = []
    for seed, each in counts.items():
        root = folder / f"{name}_s{seed}"
        files.append(save(result(each, f"{name}_s{seed}"), root / "evals" / "step_000003"))
        (root / "config.yaml").write_text(f"name: {root.name}\nseed: {seed}\n")
    return files


def test_runs_of_two_methods_have_crossed_intervals(tmp_path: Path) -> None:
    """Pairs by the runs' seeds, in whatever order files come; without seeds, or with others, independent runs."""
    low, more, high = (
        BEFORE * 3,
        [min(16, count + 1) for count in BEFORE * 3],
        [min(16, count + 6) for count in BEFORE * 3],
    )
    plain = runs(tmp_path, "plain", {1: low, 2: more, 3: low})
    better = runs(tmp_path, "better", {3: high, 1: [16, *high[1:]], 2: high})
    expected = crossed(
        *(np.array(each) / 16 for each in ([low, more, low], [[16, *high[1:]], high, high])), paired=True
    )
    assert expected is not None
    said: list[str] = []
    compare_results(None, plain, better, "1,4", True, said.append)
    assert said[0].startswith("tiny, 30 problems: from 3 runs (plain_s1 step 0, ")
    assert any("over runs and problems (3 pairs of runs of one seed)" in line for line in said)
    (line,) = (line for line in said if line.startswith("  pass@1 ") and " -> " in line)
    bounds, over_runs = expected.interval(), expected.over_runs()
    assert f"[{bounds.low:+.4f}, {bounds.high:+.4f}]  [{over_runs.low:+.4f}, {over_runs.high:+.4f}]" in line
    assert line.endswith("*") and any(line.startswith("  1/4: ") and "chance" not in line for line in said)
    assert any(line.startswith("    gained ") and "/48 to " in line for line in said)
    said.clear()
    compare_results(None, plain[:2], better[1:], "1", False, said.append)
    assert any("(independent runs)" in line for line in said)
    for other in (better[:2], [save(result(high, f"m{i}"), tmp_path / f"elsewhere{i}") for i in range(3)]):
        said.clear()
        compare_results(None, plain, other, "1", False, said.append)
        assert any("(independent runs)" in line for line in said)
    same = [save(result(low, f"w{i}", identity={"weights": "x"}), tmp_path / f"same{i}") for i in range(2)]
    said.clear()
    compare_results(None, same, better, "1", False, said.append)
    assert any("same0/tiny.json and " in line and line.endswith("not two runs") for line in said)
    said.clear()
    compare_results(None, plain, better[:1], "1", False, said.append)
    assert any(line.startswith("one run on a side: ") for line in said) and not any("*" in line for line in said)


def test_stars_are_given_after_holms_correction_over_metrics_that_differ(tmp_path: Path) -> None:
    """A p below 5 % of its own is not enough; avg@n and maj@1, which are pass@1 by other names, cost nothing."""
    rng = np.random.default_rng(1)
    counts = {seed: [int(each) for each in rng.integers(0, 9, 40)] for seed in (1, 2, 3)}
    higher = {
        seed: [min(16, count + 1 + (seed == 3) + number % 2) for number, count in enumerate(each)]
        for seed, each in counts.items()
    }
    plain, better = runs(tmp_path, "plain", counts), runs(tmp_path, "better", higher)
    said: list[str] = []
    compare_results(None, plain, better, "1,4", False, said.append)
    results = [[load_result(file) for file in side] for side in (plain, better)]
    found = compare_sides(Side(results[0], plain), Side(results[1], better), (1, 4), paired=True)
    own = {each.name: float(each.crossed.p_value()) for each in found.differences if each.crossed is not None}
    assert own["avg@n"] == own["maj@1"] == own["pass@1"]
    distinct = dict.fromkeys(own.values())
    corrected = dict(zip(distinct, adjusted(list(distinct)), strict=True))
    rows = {line.split()[0]: line for line in said if " -> " in line}
    for name, p in own.items():
        assert f"  {corrected[p]:.3f}" in rows[name] and rows[name].endswith("*") == (corrected[p] <= 0.05), name
    # Both cases occur, and the correction over all names would give other ones.
    starred = [name for name, p in own.items() if corrected[p] <= 0.05]
    missed = [name for name, p in own.items() if p < 0.05 < corrected[p]]
    assert starred and missed, own
    assert any(p <= 0.05 < every for p, every in zip(own.values(), adjusted(list(own.values())), strict=True))


def test_options_with_several_values_take_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--compare A B --with C`, before and after other options, with `=` and repeated; none at all is refused."""
    got: list[tuple[object, ...]] = []
    monkeypatch.setattr("megasharp.reporting.comparison.compare_results", lambda *given: got.append(given[:5]))
    one, two, three = (Path(name) for name in ("one.json", "two.json", "three.json"))
    for line, files, beside, named in (
        ("eval --compare one.json two.json", [one, two], [], False),
        ("eval --compare one.json two.json --problems --with three.json", [one, two], [three], True),
        ("eval --with=three.json --compare one.json --compare two.json", [one, two], [three], False),
    ):
        app(line.split(), standalone_mode=False)
        assert got.pop() == (None, files, beside, None, named), line
    with pytest.raises(Exception, match="requires an argument"):
        app(["eval", "--compare", "--problems"], standalone_mode=False)
