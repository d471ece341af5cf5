"""A user's own reward judges training's problems, in this process and in workers; other tasks keep their verifiers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case
from verdict_limits import limit_only

from megasharp.common.errors import RunFailed, UserError
from megasharp.common.records import Outcome, TaskAnswer
from megasharp.common.terminal import visible
from megasharp.config.data import MixedSource, RewardConfig
from megasharp.config.reward_levels import RewardLevels
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.countdown_tags import TaggedCountdownAnswer
from megasharp.tasks.judge import Item, TaskItem
from megasharp.tasks.math import MathAnswer
from megasharp.tasks.table import make_verifiers
from megasharp.trainer.reward_judge import (
    RewardJudge,
    check_judging,
    made_up_responses,
    own_rewards,
    training_items,
    workers_for,
)

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


@each_case(
    ("text", "outcome", "reward"),
    [
        ("<answer>1+2</answer>", Outcome.CORRECT, 2.0),
        ("<answer>1*2</answer>", Outcome.WRONG, 0.25),
        ("<answer>three</answer>", Outcome.FORMAT, 0.25),
        ("1+2", Outcome.FORMAT, -1.0),
        # Nothing of it is judged: its thinking was never closed.
        ("<think><answer>1+2</answer>", Outcome.FORMAT, -1.0),
    ],
)
def test_levels_change_rewards_and_no_outcome(text: str, outcome: Outcome, reward: float) -> None:
    levels = RewardLevels(correct=2.0, well_formed=0.25, other=-1.0)
    item = Item("countdown_3to4", text, TaggedCountdownAnswer((1, 2), 3))
    with closing(RewardJudge(RewardConfig(levels=levels), {item.task}, None, print)) as judging:
        (verdict,) = judging.judge.verdicts([item])
    with closing(RewardJudge(RewardConfig(), {item.task}, None, print)) as judging:
        (plain,) = judging.judge.verdicts([item])
    assert (verdict.outcome, verdict.reward) == (outcome, reward)
    assert replace(verdict, reward=plain.reward) == plain


def test_levels_leave_a_users_own_rewards(path: str) -> None:
    source = MixedSource(path="a.jsonl", source="mine", reward=path)
    own = own_rewards(RewardConfig(), [source])
    (task,) = own
    with closing(RewardJudge(RewardConfig(workers=0, levels=RewardLevels()), {task}, None, print, own)) as judging:
        (verdict,) = judging.judge.verdicts([Item(task, "1*2", ANSWER)])
    assert verdict.reward == 0.3
    with pytest.raises(ValueError, match="levels are of a task's verifier"):
        RewardConfig(function=path, levels=RewardLevels())


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_function_fails_by_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    text, log = "import sys\ndef ends(text, answer): sys.exit(3)\n", tmp_path / "verifiers.log"
    (tmp_path / "own_ending.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    said: list[str] = []
    with closing(
        RewardJudge(RewardConfig(function="own_ending:ends", workers=workers), [], log, said.append)
    ) as judging:
        verdicts = judging.judge.verdicts([Item("own", text, ANSWER) for text in ("1", "2")])
    assert [verdict.outcome for verdict in verdicts] == [Outcome.ERROR] * 2
    file = tmp_path / "own_ending.py"
    place = f'File "{file}", line 2, in ends'
    told = f"{place}\n        def ends(text, answer): sys.exit(3)\n    SystemExit: 3"
    assert said == [
        "reward.function fails (SystemExit: 3); more of the kind are only counted, in reward/errors\n"
        f"    Traceback (most recent call last):\n      {told}"
    ]
    assert judging.blame() == (
        f"2 failed since the start, the first with {place}: def ends(text, answer): sys.exit(3): SystemExit: 3 "
        f"(more in {log})"
    )
    whole = f"reward.function fails (SystemExit at {file}:2)\nTraceback (most recent call last):\n  {place}\n"
    assert log.read_text() == (
        f"{whole}    def ends(text, answer): sys.exit(3)\nSystemExit: 3\n1 more: SystemExit at {file}:2\n"
    )
    assert {verdict.failure for verdict in verdicts} == {f"SystemExit at {file}:2"}


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
    assert said == ["reward.function fails (no verdict in 1 s); more of the kind are only counted, in reward/errors"]


ROWS = [TaskItem(name, "own", "1 2=3:", ANSWER, "train.jsonl") for name in ("a", "b")]
TRIED = """
import os, signal, time
def calls(): return 1
def fine(text, answer): return text == "3"
def nothing(text, answer): return None
def answer_only(text, answer):
    if text == "3":
        raise RuntimeError("no\\x1b[2J")
    return 0
def second(text, answer):
    calls.done = getattr(calls, "done", 0) + 1
    return 1.0 if calls.done < 2 else len(None)
def hangs(text, answer): time.sleep(3600)
def killed(text, answer): os.kill(os.getpid(), signal.SIGKILL)
def cancelled(text, answer): raise KeyboardInterrupt
def long(text, answer): raise RuntimeError("x" * 1_000_000)
class Unpicklable(Exception):
    def __init__(self, one, two): super().__init__(lambda: one)
def unpicklable(text, answer): raise Unpicklable(1, 2)
def changes(text, answer): answer.target = 4
"""


@each_case(
    ("name", "error", "said"),
    [
        (
            "nothing",
            UserError,
            r"row a of train.jsonl and the made-up response '': UnusableReward: returned None; every",
        ),
        (
            "answer_only",
            UserError,
            r"response '3': File .*, line 8, in answer_only: .*: RuntimeError: no\\x1b\[2J",
        ),
        ("second", UserError, r"line 12, in second: .*: TypeError: object of type 'NoneType' has no len"),
        ("hangs", UserError, r"response '': no verdict in 1 s"),
        ("killed", RunFailed, r"its worker process died 2 times: killed by SIGKILL"),
        ("cancelled", UserError, r"in cancelled: .*KeyboardInterrupt"),
        ("long", UserError, r"in long: .*: RuntimeError: x{400,500};"),
        ("unpicklable", UserError, r"in unpicklable: .*Unpicklable: <function"),
        ("changes", UserError, r"in changes: def .*: dataclasses.FrozenInstanceError: cannot assign to field 'target'"),
    ],
)
def test_a_reward_that_does_not_work_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[UserError], said: str
) -> None:
    (tmp_path / "own_tried.py").write_text(TRIED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    limit_only(monkeypatch, lambda item: name == "hangs")
    reward, log, shown = (
        RewardConfig(function=f"own_tried:{name}", workers=int(name in ("hangs", "killed")), timeout_s=1.0),
        tmp_path / "log",
        list[str](),
    )
    with (
        closing(RewardJudge(reward, [], log, shown.append)) as judging,
        pytest.raises(UserError, match=said) as refused,
    ):
        judging.try_function(ROWS)
    line = str(refused.value)
    assert type(refused.value) is error and visible(line) == line and "\n" not in line and len(line) < 2000
    assert line.startswith(f"reward.function: own_tried:{name} gives no reward for row ")
    assert line.endswith(f"; more in {log}") and log.stat().st_size < 5000
    assert all(visible(text) == text for text in (*shown, log.read_text()))


def test_a_reward_that_works_is_called_on_real_rows_and_made_up_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_tried.py").write_text(TRIED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    judging = RewardJudge(RewardConfig(function="own_tried:fine", workers=0), [], None, print)
    judging.try_function(ROWS)
    assert judging.judge.failures == 0
    assert list(made_up_responses(ANSWER)) == ["", "These are words without an answer.", "3"]
    assert list(made_up_responses(TaskAnswer()))[2:] == []


def test_without_a_function_nothing_is_different() -> None:
    assert training_items([ITEM], RewardConfig()) == [ITEM]
    assert set(make_verifiers()) == {
        "choice",
        "countdown",
        "countdown_3",
        "countdown_3to4",
        "environment",
        "form",
        "knights",
        "knights_short",
        "math",
        "maze",
        "short_answer",
        "synlogic",
        "tools",
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
