"""A user's own reward judges training's problems, in this process and in workers; other tasks keep their verifiers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from verdict_limits import limit_only

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome
from megasharp.config.data import RewardConfig
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.judge import Item, TaskItem
from megasharp.tasks.math import MathAnswer
from megasharp.tasks.table import make_verifiers
from megasharp.trainer.reward_judge import RewardJudge, check_judging, training_items, workers_for

ANSWER = CountdownAnswer((1, 2), 3)
ITEM = TaskItem("a", "countdown", "1 2=3:", ANSWER, "train.jsonl")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_judging.py").write_text("def length(text, answer): return len(text) / 10\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "own_judging:length"


@pytest.mark.parametrize("workers", [0, 1])
def test_training_is_judged_by_the_function_and_evaluation_by_the_task(path: str, workers: int) -> None:
    reward = RewardConfig(function=path, workers=workers)
    (item,) = training_items([ITEM], reward)
    with closing(RewardJudge(reward, {ITEM.task}, None, print)) as judging:
        own, ordinary = judging.judge.verdicts([Item(item.task, "1*2", ANSWER), Item(ITEM.task, "1*2", ANSWER)])
        assert item.task in judging.judge.tasks
    assert (own.outcome, own.reward) == (Outcome.WRONG, 0.3)
    assert (ordinary.outcome, ordinary.reward, ordinary.detail) == (Outcome.WRONG, 0.0, "misses the target")


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_function_fails_by_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    text = "import sys\ndef ends(text, answer): sys.exit(3)\n"
    (tmp_path / "own_ending.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    said: list[str] = []
    with closing(
        RewardJudge(RewardConfig(function="own_ending:ends", workers=workers), [], None, said.append)
    ) as judging:
        verdicts = judging.judge.verdicts([Item("own", text, ANSWER) for text in ("1", "2")])
    assert [verdict.outcome for verdict in verdicts] == [Outcome.ERROR] * 2
    assert said == [
        "reward.function fails on a response, which gets reward 0 (SystemExit: 3); reported once, counted as "
        "outcome_error"
    ]


def test_a_function_that_hangs_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for workers: a run would wait for this function for ever."""
    text = "import time\ndef hangs(text, answer): time.sleep(3600 if text == '1' else 0); return 1.0\n"
    (tmp_path / "own_hanging.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    limit_only(monkeypatch, lambda item: item.text == "1")
    reward, said = RewardConfig(function="own_hanging:hangs", timeout_s=1.0), list[str]()
    assert 1 <= workers_for(reward, {"countdown"}) <= 4
    check_judging(reward, {"countdown"}, "run.yaml")
    with closing(RewardJudge(reward, {"countdown"}, None, said.append)) as judging:
        verdicts = judging.judge.verdicts([Item("own", text, ANSWER) for text in ("1", "2")])
    assert [verdict.outcome for verdict in verdicts] == [Outcome.TIMEOUT, Outcome.CORRECT]
    assert said == [
        "reward.function fails on a response, which gets reward 0 (no verdict in 1 s); reported once, counted as "
        "outcome_timeout"
    ]


def test_without_a_function_nothing_is_different() -> None:
    assert training_items([ITEM], RewardConfig()) == [ITEM]
    assert set(make_verifiers()) == {
        "choice",
        "countdown",
        "countdown_3",
        "countdown_3to4",
        "form",
        "knights",
        "knights_short",
        "math",
        "short_answer",
        "synlogic",
    }


def test_a_path_that_is_none_is_refused_before_anything_starts() -> None:
    with pytest.raises(UserError, match=r"reward.function: cannot import own_nowhere"):
        training_items([ITEM], RewardConfig(function="own_nowhere:length"))


def test_what_no_bound_of_mathematics_holds_is_ended_by_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """An equation that sympy would solve for minutes; the same worker's place judges the next response."""
    reward = RewardConfig(workers=1, timeout_s=2.0)
    limit_only(monkeypatch, lambda item: item is bomb)
    bomb = Item("math", r"\boxed{x^9+7x^5+3x^3-\sin x+e^x=5}", MathAnswer("x^2+y^2=1"))
    plain = Item("math", r"\boxed{0.5}", MathAnswer("1/2"))
    with closing(RewardJudge(reward, ["math"], None, print)) as judging:
        outcomes = [verdict.outcome for verdict in judging.judge.verdicts([bomb, plain])]
        assert judging.take()["reward/killed"] == 1.0
    assert outcomes == [Outcome.TIMEOUT, Outcome.CORRECT]


@pytest.mark.parametrize("task", ["math", "synlogic", "reasoning_gym"])
def test_what_may_take_for_ever_is_never_judged_by_this_process(task: str) -> None:
    assert 1 <= workers_for(RewardConfig(), {"countdown", task}) <= 4
    check_judging(RewardConfig(timeout_s=3.0), {task}, "run.yaml")
    with pytest.raises(UserError, match=rf"run.yaml: task {task} .* reward.workers=0 .*leave the key out"):
        check_judging(RewardConfig(workers=0), {task}, "run.yaml")


def test_plain_tasks_need_no_process_and_a_number_that_is_given_is_kept() -> None:
    assert workers_for(RewardConfig(), {"countdown", "choice"}) == 0
    assert workers_for(RewardConfig(workers=0), {"countdown"}) == 0
    assert workers_for(RewardConfig(workers=7), {"countdown", "math"}) == 7
