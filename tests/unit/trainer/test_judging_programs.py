"""A run's judge: with programs only where a sandbox is, and what happened to workers counted once."""

from __future__ import annotations

import shutil
from contextlib import closing

import pytest
from verdict_limits import limit_only

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome
from megasharp.config.data import RewardConfig
from megasharp.tasks.code import CodeAnswer, StdinTest
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.judge import Item
from megasharp.trainer import reward_judge as module
from megasharp.trainer.reward_judge import RewardJudge, check_judging

COUNTDOWN = Item("countdown", "1+2", CountdownAnswer((1, 2), 3))
PROGRAM = Item("code", "```\nprint(input())\n```", CodeAnswer(stdin=(StdinTest("x", "x"),)))
HANGING = Item("code", "```\nimport time\ntime.sleep(3600)\n```", PROGRAM.answer)


def judging(tasks: set[str], said: list[str], **reward: object) -> RewardJudge:
    return RewardJudge(RewardConfig.model_validate(reward), tasks, None, said.append)


def test_without_programs_no_sandbox_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    said: list[str] = []
    with closing(judging({"countdown"}, said)) as here:
        assert here.judge.verdicts([COUNTDOWN])[0].outcome is Outcome.CORRECT
        assert "code" not in here.judge.tasks and here.take() == {} and said == []


def test_programs_without_bubblewrap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    for tasks in ({"code"}, {"countdown", "code"}):
        with pytest.raises(UserError, match=r"reward.sandbox: .* not installed"):
            check_judging(RewardConfig(), tasks, "run.yaml")
    with pytest.raises(UserError, match=r"reward.sandbox: .* not installed"):
        judging({"code"}, [])


def test_the_risk_is_said_in_one_line() -> None:
    said: list[str] = []
    with closing(judging({"code"}, said, sandbox="none")) as here:
        assert here.judge.verdicts([PROGRAM, COUNTDOWN])[0].outcome is Outcome.CORRECT
    (line,) = said
    assert line.startswith("reward.sandbox=none: ") and "\n" not in line


def test_a_limit_that_nobody_keeps_is_refused() -> None:
    with pytest.raises(UserError, match=r"run.yaml: reward.timeout_s is kept by worker processes"):
        check_judging(RewardConfig(timeout_s=3.0), {"countdown"}, "run.yaml")
    check_judging(RewardConfig(timeout_s=3.0, sandbox="none"), {"code"}, "run.yaml")
    check_judging(RewardConfig(timeout_s=3.0, workers=1), {"countdown"}, "run.yaml")


def test_programs_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs is ended by its verifier: no worker is killed for it."""
    # Of 20 s: 5 for a program and 15 to end it, where it has one by itself, which a busy machine may exceed.
    monkeypatch.setattr(module, "_PROGRAMS_SHARE", 0.25)
    limit_only(monkeypatch, lambda item: item is HANGING)
    with closing(judging({"code"}, [], sandbox="none", workers=1, timeout_s=20.0)) as there:
        outcomes = [verdict.outcome for verdict in there.judge.verdicts([PROGRAM, HANGING, COUNTDOWN])]
        assert outcomes == [Outcome.CORRECT, Outcome.TIMEOUT, Outcome.CORRECT]
        assert there.take() == {"reward/killed": 0.0, "reward/died": 0.0, "reward/retried": 0.0}
