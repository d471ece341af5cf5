"""Two results compared: figures that follow from counts, boundaries crossed, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megasharp.common.errors import UserError
from megasharp.evals.compare import Crossing, compare
from megasharp.evals.estimators import pass_at_k_mean
from megasharp.evals.result import EvalResult, EvalSetting, summarize
from megasharp.evals.result_files import save
from megasharp.evals.samples import Answers, ProblemResult
from megasharp.trainer.evaluation import compare_results

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
    compare_results(None, one, other, None, True, said.append)
    text = "\n".join(said)
    assert "tiny, 10 problems: from base step 0 to tuned step 30" in text
    target = pass_at_k_mean(BEFORE, 16, 4)
    assert (
        f"pass@4 {target:.4f}: 3 (0.75 k) ({pass_at_k_mean(AFTER, 16, 3):.4f})" in text
        and "not with all its samples" in text
    )
    assert "1/4: 3 gained, 0 lost, chance 0.25" in text and "    gained p7: 3/16 to 12/16" in text
    quiet: list[str] = []
    compare_results(None, one, other, "1,16", False, quiet.append)
    assert not any("p7" in line or "pass@4" in line for line in quiet)
    for arguments, message in (
        ((tmp_path, one, other, None), "--compare takes two result files"),
        ((None, one, tmp_path / "c.json", None), "cannot read this evaluation"),
        ((None, one, other, "32"), r"--k 32: .* has 16 samples per problem"),
    ):
        with pytest.raises(UserError, match=message):
            compare_results(*arguments, False, said.append)
