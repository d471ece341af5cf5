"""A user's own reward: what it may return, and every way in which its path may be wrong."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, Verdict
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.own_reward import OwnReward, find_function

ANSWER = CountdownAnswer((1, 2), 3)
MODULE = """
from megasharp.common.records import Outcome, Verdict

def half(text, answer): return 0.5
def one(text, answer): return 1
def brief(text, answer, longest=5): return float(len(text) <= longest)
def verdict(text, answer): return Verdict(Outcome.CORRECT, 0.7, str(answer.target), "mine")
def nothing(text, answer): return None
def numpy_half(text, answer):
    import numpy
    return numpy.float32(0.5)
def says_nothing(text: str, answer) -> None: return None
def says_yes(text: str, answer) -> bool: return True
def takes_tokens(text: list, answer) -> float: return 1.0
def takes_text(text: str, answer: str) -> float: return 1.0
def yes(text, answer): return True
def infinite(text, answer): return float("inf")
def not_a_number(text, answer): return Verdict(Outcome.WRONG, float("nan"))
def fails(text, answer): raise RuntimeError("mine")
def of_one(text): return 1.0
def of_three(text, answer, more): return 1.0
def named(*, text, answer): return 1.0
async def later(text, answer): return 1.0
number = 3
class Rules:
    @staticmethod
    def strict(text, answer): return 0.0
class Callable:
    def __call__(self, text, answer): return 1.0
instance = Callable()
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "own_broken.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


@each_case(
    ("name", "expected"),
    [
        ("half", Verdict(Outcome.WRONG, 0.5)),
        ("numpy_half", Verdict(Outcome.WRONG, 0.5)),
        ("one", Verdict(Outcome.CORRECT, 1.0)),
        ("brief", Verdict(Outcome.CORRECT, 1.0)),
        ("verdict", Verdict(Outcome.CORRECT, 0.7, "3", "mine")),
        ("Rules.strict", Verdict(Outcome.WRONG, 0.0)),
        ("instance", Verdict(Outcome.CORRECT, 1.0)),
    ],
)
def test_what_it_returns_is_a_verdict(name: str, expected: Verdict) -> None:
    reward = OwnReward(f"own_rewards:{name}")
    assert reward("1+2", ANSWER) == expected
    assert pickle.loads(pickle.dumps(reward))("1+2", ANSWER) == expected


@each_case(
    ("name", "message"),
    [
        ("nothing", "own_rewards:nothing returned NoneType, neither a Verdict nor a number"),
        ("yes", "returned bool"),
        ("infinite", "returned the reward inf"),
        ("not_a_number", "returned the reward nan"),
        ("fails", "mine"),
    ],
)
def test_anything_else_is_raised(name: str, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        OwnReward(f"own_rewards:{name}")("1+2", ANSWER)


@each_case(
    ("path", "message"),
    [
        ("own_rewards.half", "must be written package.module:function"),
        ("own_rewards:", "must be written package.module:function"),
        (":half", "must be written package.module:function"),
        ("own rewards:half", "must be written package.module:function"),
        ("own_absent:half", r"cannot import own_absent \(ModuleNotFoundError: .*PYTHONPATH"),
        ("own_broken:half", r"cannot import own_broken \(ZeroDivisionError: division by zero\)"),
        ("own_rewards:absent", "own_rewards has no 'absent'; name one of its functions"),
        ("own_rewards:number", "own_rewards:number is a int; name a function"),
        ("own_rewards:later", "is asynchronous"),
        ("own_rewards:of_one", r"cannot be called with \(text, answer\) \(too many positional arguments\)"),
        ("own_rewards:of_three", r"cannot be called with \(text, answer\) \(missing a required argument"),
        ("own_rewards:says_nothing", "says it returns NoneType; it must return a Verdict or a number"),
        ("own_rewards:says_yes", "says it returns bool"),
        ("own_rewards:takes_tokens", "takes text as list; it is given a str there"),
        ("own_rewards:takes_text", "takes answer as str; it is given a TaskAnswer there"),
        ("own_rewards:named", r"cannot be called with \(text, answer\)"),
    ],
)
def test_a_wrong_path_is_refused_in_one_line(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        find_function(path)
    assert str(refused.value).startswith("reward.function: ")
    assert "\n" not in str(refused.value)
