"""reasoning-gym's problems: its own answers are right, parts of them are not, and a file gives the same ones again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cases import each_case
from waiting import HANG_S

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome
from megasharp.config.data import RewardConfig
from megasharp.tasks.judge import Item
from megasharp.tasks.reasoning_gym import EVALUATED, GymAnswer, GymDataset, calls, read_records, verify
from megasharp.tasks.table import make_verifiers
from megasharp.trainer.reward_judge import RewardJudge, check_judging

FILE = Path(__file__).parents[1] / "data" / "files" / "reasoning_gym.yaml"
# Quick to make, and of every kind: exact texts, partial scores, many solutions.
NAMES = (
    "base_conversion",
    "chain_sum",
    "countdown",
    "gcd",
    "knights_knaves",
    "mini_sudoku",
    "n_queens",
    "word_sorting",
)


@each_case("name", NAMES)
def test_the_librarys_own_answers_are_right_and_nothing_below_a_score_of_one(name: str) -> None:
    from reasoning_gym.factory import create_dataset

    theirs = create_dataset(name, size=5, seed=3)
    for index in range(5):
        answer, entry = GymAnswer(GymDataset(name, 5, 3), index), theirs[index]
        verdict = verify(f"<think>?</think><answer>{entry['answer']}</answer>", answer)
        assert (verdict.outcome, verdict.reward) == (Outcome.CORRECT, 1.0)
        for wrong in ("no idea", "0", f"{entry['answer']} 1"):
            verdict = verify(f"<answer>{wrong}</answer>", answer)
            score = theirs.score_answer(wrong, entry)
            assert verdict.reward == pytest.approx(score, abs=1e-9)
            assert verdict.outcome is (Outcome.CORRECT if score == 1.0 else Outcome.WRONG)


@each_case("text", ["7", "<answer></answer>", "<answer>7", "<answer>" + "7" * 20_000 + "</answer>", ""])
def test_without_an_answer_nothing_is_earned(text: str) -> None:
    verdict = verify(text, GymAnswer(GymDataset("countdown", 1, 1), 0))
    assert (verdict.outcome, verdict.reward) == (Outcome.FORMAT, 0.0)


@each_case(
    "text",
    [
        "__import__('os').system('touch {}')",
        "[__import__('os').system('touch {}')]",
        'exec(\'open("{}", "w")\')',
        '[exec][0](\'open("{}", "w")\')',
        'exec \\\n(\'open("{}", "w")\')',
        'exec #\n(\'open("{}", "w")\')',
        '(exec)(\'open("{}", "w")\')',
        "open('{}', 'w')",
        "[open(f, 'w') for f in ['{}']]",
    ],
)
def test_no_answer_is_run(text: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for name in sorted(EVALUATED):
        verdict = verify(f"<answer>{text.format(made)}</answer>", GymAnswer(GymDataset(name, 1, 1), 0))
        assert (verdict.outcome, verdict.reward) == (Outcome.FORMAT, 0.0), name
        assert not made.exists(), name


def test_what_mathematics_calls_is_judged() -> None:
    from reasoning_gym.factory import create_dataset

    for text in (
        "sin(x)*(x+1)",
        "exp(2*x)/4 + C",
        "(1+2)*(3-4)",
        "[[1, 0], [0, 1]]",
        "x**2*(3)",
        "log(x)",
        "['a', 'b']",
    ):
        assert not calls(text), text
    for name in sorted(EVALUATED):
        theirs = create_dataset(name, size=3, seed=1)
        assert not any(calls(str(theirs[index]["answer"])) for index in range(3)), name


def test_a_score_beyond_its_range_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.factory import DATASETS

    dataset_class, _ = DATASETS["chain_sum"]
    for score in (1.5, -0.1, float("nan")):
        monkeypatch.setattr(dataset_class, "score_answer", lambda self, answer, entry, score=score: score)
        with pytest.raises(ValueError, match="not between 0 and 1"):
            verify("<answer>1</answer>", GymAnswer(GymDataset("chain_sum", 1, 1), 0))


def test_the_same_file_gives_the_same_problems_in_another_process() -> None:
    records = read_records(FILE)
    assert [record.id for record in records] == [
        "chain_sum-1-00000",
        "chain_sum-1-00001",
        "knights_knaves-2-00000",
        "knights_knaves-2-00001",
        "knights_knaves-2-00002",
    ]
    script = (
        "import json, sys; from pathlib import Path; from megasharp.tasks.reasoning_gym import read_records; "
        "print(json.dumps([record.question for record in read_records(Path(sys.argv[1]))]))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(FILE)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [record.question for record in records]


def test_worker_processes_judge_them() -> None:
    from reasoning_gym.factory import create_dataset

    items = [
        Item("reasoning_gym", f"<answer>{each}</answer>", GymAnswer(GymDataset("gcd", 4, 1), index))
        for index, each in enumerate([create_dataset("gcd", size=4, seed=1)[0]["answer"], "0", "-", "x"])
    ]
    judging = RewardJudge(RewardConfig(workers=1, timeout_s=HANG_S), {"reasoning_gym"}, None, print)
    try:
        outcomes = [verdict.outcome for verdict in judging.judge.verdicts(items)]
    finally:
        judging.close()
    assert outcomes == [Outcome.CORRECT, Outcome.WRONG, Outcome.WRONG, Outcome.WRONG]


def test_this_process_does_not_judge_them() -> None:
    with pytest.raises(UserError, match=r"reasoning_gym is judged in worker processes alone.*leave the key out"):
        check_judging(RewardConfig(workers=0), {"reasoning_gym"}, "run.yaml")
    check_judging(RewardConfig(workers=1), {"reasoning_gym"}, "run.yaml")
    assert "reasoning_gym" not in make_verifiers()


@each_case(
    ("written", "message"),
    [
        ("datasets: [{name: chain_summ}]", "no data set 'chain_summ'; is it chain_sum"),
        ("datasets: [{name: qqqqq}]", "no data set 'qqqqq'; it has ab, acre"),
        (
            "datasets: [{name: gcd, config: {digits: 3}}]",
            "gcd cannot be made with .*its options are max_numbers, max_value",
        ),
        ("datasets: [{name: gcd, config: {min_value: -5}}]", "gcd cannot be made with"),
        ("datasets: [{name: gcd, size: 0}]", "size"),
        ("datasets: []", "datasets"),
        ("sets: [{name: gcd}]", "sets"),
        ("datasets: [{name: gcd, size: 1}, {name: gcd, size: 2}]", "a name with the same seed twice"),
    ],
)
def test_what_a_file_must_not_say(written: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "gym.yaml"
    path.write_text(written)
    with pytest.raises(UserError, match=message) as error:
        read_records(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_records(tmp_path / "none.yaml")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install 'megasharp\[reasoning-gym\]'"):
        make_verifiers({"reasoning_gym"})
