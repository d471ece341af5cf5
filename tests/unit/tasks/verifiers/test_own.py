"""A user's own reward: what it may return, and every way in which its path may be wrong."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, Verdict
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.judge import Item, TaskItem
from megasharp.tasks.own_reward import OwnFunction, OwnReward
from megasharp.tasks.reward_signature import signature_of
from megasharp.tasks.sandbox.worker import decode, encode

ANSWER = CountdownAnswer((1, 2), 3)
ITEMS = [Item("own", "1+2", ANSWER)]
MODULE = """
from megasharp.common.records import Outcome, Verdict
import numpy
import torch
from decimal import Decimal
from fractions import Fraction

def half(text, answer): return 0.5
def one(text, answer): return 1
def brief(text, answer, longest=5): return float(len(text) <= longest)
def verdict(text, answer): return Verdict(Outcome.CORRECT, 0.7, str(answer.target), "mine")
def nothing(text, answer): return None
def numpy_half(text, answer): return numpy.float32(0.5)
def says_nothing(text: str, answer) -> None: return None
def says_text(text, answer) -> str: return "1"
def says_yes(text: str, answer) -> bool: return True
def takes_tokens(text: list, answer) -> float: return 1.0
def takes_text(text: str, answer: str) -> float: return 1.0
def yes(text, answer): return True
def says_numpy(text, answer) -> "numpy.float32": return 1.0
def text(text, answer): return "1.0"
def listed(text, answer): return [1.0]
def keyed(text, answer): return {"reward": 1.0}
def imaginary(text, answer): return 1 + 0j
def coroutine(text, answer):
    made = later(text, answer)
    made.close()
    return made
def generator(text, answer): yield 1.0
def numpy_two(text, answer): return numpy.array([1.0, 2.0])
def torch_two(text, answer): return torch.tensor([1.0, 2.0])
def numpy_text(text, answer): return numpy.str_("1.0")
def numpy_yes(text, answer): return numpy.bool_(True)
def numpy_array(text, answer): return numpy.array(0.5)
def numpy_whole(text, answer): return numpy.int64(1)
def torch_half(text, answer): return torch.tensor(0.5, requires_grad=True)
def torch_one(text, answer): return torch.tensor([True])
def third(text, answer): return Fraction(1, 4)
def decimal(text, answer): return Decimal("0.25")
def verdict_of_numpy(text, answer): return Verdict(Outcome.CORRECT, numpy.float32(1), numpy.str_("3"), "x" * 1_000_000)
def verdict_by_name(text, answer): return Verdict("format", True, None, None)
def verdict_of_none(text, answer): return Verdict(Outcome.CORRECT, None)
def verdict_of_nonsense(text, answer): return Verdict("good", 1.0)
def verdict_of_a_number(text, answer): return Verdict(Outcome.CORRECT, 1.0, 24)
class NoText(Exception):
    def __str__(self): raise RuntimeError
def no_text(text, answer): raise NoText
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
        ("yes", Verdict(Outcome.CORRECT, 1.0)),
        ("says_yes", Verdict(Outcome.CORRECT, 1.0)),
        ("says_numpy", Verdict(Outcome.CORRECT, 1.0)),
        ("numpy_yes", Verdict(Outcome.CORRECT, 1.0)),
        ("numpy_array", Verdict(Outcome.WRONG, 0.5)),
        ("numpy_whole", Verdict(Outcome.CORRECT, 1.0)),
        ("torch_half", Verdict(Outcome.WRONG, 0.5)),
        ("torch_one", Verdict(Outcome.CORRECT, 1.0)),
        ("third", Verdict(Outcome.WRONG, 0.25)),
        ("decimal", Verdict(Outcome.WRONG, 0.25)),
        ("verdict_of_numpy", Verdict(Outcome.CORRECT, 1.0, "3", "x" * 500)),
        ("verdict_by_name", Verdict(Outcome.FORMAT, 1.0)),
    ],
)
def test_what_it_returns_is_a_verdict(name: str, expected: Verdict) -> None:
    reward = OwnReward((OwnFunction(f"own_rewards:{name}"),))
    (found,) = reward.verdicts(ITEMS)
    assert found == expected
    assert {type(found.outcome), type(found.reward)} == {Outcome, float}
    assert decode(encode([found])) == [expected], "it does not leave a worker as it is"
    assert pickle.loads(pickle.dumps(reward)).verdicts(ITEMS) == [expected]


@each_case(
    ("name", "message"),
    [
        ("nothing", "^returned None; every response needs a number or a Verdict$"),
        ("text", r"^returned '1.0' \(str\), neither a number nor a Verdict$"),
        ("listed", r"^returned \[1.0\] \(list\)"),
        ("keyed", r"^returned {'reward': 1.0} \(dict\)"),
        ("imaginary", r"^returned \(1\+0j\) \(complex\)"),
        ("coroutine", r"^returned <coroutine .* \(coroutine\)"),
        ("generator", r"^returned <generator .* \(generator\)"),
        ("numpy_two", r"^returned array\(\[1., 2.\]\) \(ndarray\)"),
        ("torch_two", r"^returned tensor\(\[1., 2.\]\) \(Tensor\)"),
        ("numpy_text", r"^returned .*1.0.* \(str_\)"),
        ("verdict_of_none", r"^returned a Verdict whose reward is None \(NoneType\), not a number"),
        ("verdict_of_nonsense", r"^returned a Verdict whose outcome is 'good' \(str\), not an Outcome"),
        ("verdict_of_a_number", r"^returned a Verdict whose canonical_answer is 24 \(int\), not a text"),
        ("no_text", "its text cannot be made"),
        ("infinite", "returned the reward inf"),
        ("not_a_number", "returned the reward nan"),
        ("fails", "mine"),
    ],
)
def test_anything_else_is_raised(name: str, message: str) -> None:
    (verdict,) = OwnReward((OwnFunction(f"own_rewards:{name}"),)).verdicts(ITEMS)
    kind, _, said = verdict.detail.partition(": ")
    assert verdict.outcome is Outcome.ERROR and verdict.failure.startswith(f"{kind} at ") and re.search(message, said)


@each_case(
    ("path", "message"),
    [
        ("own_rewards.half", "must be written package.module:name"),
        ("own_rewards:", "must be written package.module:name"),
        (":half", "must be written package.module:name"),
        ("own rewards:half", "must be written package.module:name"),
        ("own_absent:half", r"cannot import own_absent \(ModuleNotFoundError: .*beside the run file"),
        ("own_broken:half", r"cannot import own_broken \(ZeroDivisionError: division by zero\)"),
        ("own_rewards:haff", "own_rewards has no 'haff'; nearest is half; known are: half, .*, [.]{3}$"),
        ("own_rewards:number.half", "own_rewards has no 'number.half'; nor any other function or class"),
        ("own_rewards:number", "own_rewards:number is a int; name a function or a class"),
        ("own_rewards:of_one", r"cannot be called with \(text, answer\) \(too many positional arguments\)"),
        ("own_rewards:of_three", r"cannot be called with \(text, answer\) \(missing a required argument"),
        ("own_rewards:says_nothing", "says it returns NoneType; it must return a Verdict or a number"),
        ("own_rewards:says_text", "says it returns str; it must return a Verdict or a number"),
        ("own_rewards:takes_tokens", "takes text as list; it is given a str there"),
        ("own_rewards:takes_text", "takes answer as str; it is given a CountdownAnswer there"),
        ("own_rewards:named", r"cannot be called with \(text, answer\)"),
    ],
)
def test_a_wrong_path_is_refused_in_one_line(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        signature_of(path).check_rows([TaskItem("a", "own", "", ANSWER, "train.jsonl")])
    assert str(refused.value).startswith("reward.function: ")
    assert "\n" not in str(refused.value)
