"""Each example of a user's reward, as workers judge by it; batches of which one response is to blame; odd values."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from cases import each_case
from waiting import HANG_S

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, Verdict
from megasharp.config.data import RewardConfig
from megasharp.tasks.judge import Item, TaskItem, batches
from megasharp.tasks.own_reward import BATCH, OwnFunction, OwnReward
from megasharp.tasks.own_rows import OwnAnswer
from megasharp.tasks.reward_signature import signature_of
from megasharp.trainer.reward_judge import RewardJudge, own_rewards, training_items

EXAMPLES = Path(__file__).parents[3] / "examples" / "rewards"
ROW = {"question": "3 + 4?", "answer": "7", "level": 2}
ITEM = TaskItem("a", "own", "3 + 4?", OwnAnswer("7"), "mine.jsonl", row=ROW)
CHAT = (("user", "3 + 4?"),)
TEXTS = ("it is 7", "it is 8", "please 7")


def items(texts: Sequence[str], turns: tuple[tuple[str, str], ...] = ()) -> list[Item]:
    return [Item("own", text, ITEM.answer, ITEM.text, turns, ROW, (1, 2)) for text in texts]


def judged(reward: RewardConfig, asked: Sequence[Item]) -> list[Verdict]:
    with closing(RewardJudge(reward, {"own"}, None, print)) as judging:
        judging.try_function(training_items([ITEM], reward))
        return judging.judge.verdicts(asked)


@each_case(
    ("name", "style", "rewards"),
    [
        ("text_and_answer.py:correct", "(text, answer)", [1.0, 0.0, 1.0]),
        ("trl_style.py:correct", "TRL style, batched, columns question, answer, level", [1.0, 0.0, 1.0]),
        ("verl_style.py:compute_score", "verl style", [1.0, 0.0, 1.0]),
        ("asynchronous.py:correct", "(text, answer), async, up to 64 at once", [1.0, 0.0, 1.0]),
        ("with_setup.py:Judge", "class with reward, (text, answer)", [0.0, 0.0, 0.5]),
    ],
)
def test_each_example_is_a_reward(name: str, style: str, rewards: list[float]) -> None:
    reward = RewardConfig(function=f"{EXAMPLES}/{name}", workers=1)
    own = own_rewards(reward)["own"]
    assert signature_of(own.functions[0].path).in_words(ROW, own.at_once) == style
    verdicts = judged(reward, items(TEXTS, CHAT))
    assert [verdict.reward for verdict in verdicts] == rewards and not any(verdict.failure for verdict in verdicts)


def test_the_page_shows_what_the_examples_say() -> None:
    """Its functions are passages of the files, less their docstrings, and it names each file."""
    page = (EXAMPLES.parents[1] / "docs" / "how-to" / "rewards.md").read_text()
    files = [*EXAMPLES.glob("*.*")]
    texts = ["\n".join(line for line in file.read_text().splitlines() if '"""' not in line) for file in files]
    blocks = [textwrap.dedent(each) for each in re.findall(r"(?:^    .*\n)+", page, re.MULTILINE)]
    functions = [block.strip() for block in blocks if re.match(r"(async )?def |class ", block)]
    assert functions and all(any(function in text for text in texts) for function in functions)
    assert all(f"examples/rewards/{file.name}" in page for file in files)


def test_several_are_added_up_and_each_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    tree = yaml.safe_load((EXAMPLES / "several.yaml").read_text())
    verdicts = judged(RewardConfig.model_validate(tree["reward"] | {"workers": 1}), items(TEXTS))
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, pytest.approx(1.1)]
    assert verdicts[2].parts == {"correct": 1.0, "polite": 0.5} and verdicts[2].outcome is Outcome.CORRECT
    assert verdicts[1].outcome is Outcome.WRONG


ODD = """
import os, time
def seen(prompts, completions, completion_ids, **columns):
    assert prompts[0] == [{"role": "user", "content": "3 + 4?"}] and completion_ids[0] == [1, 2]
    assert set(columns) == {"question", "answer", "level"}
    return [float(each[0]["content"] == "good") for each in completions]
def texts(prompts, completions): return [float(p == "3 + 4?" and c == "good") for p, c in zip(prompts, completions)]
def one_raises(completions):
    if "bad" in completions: raise ValueError("mine")
    return [1.0] * len(completions)
def one_ends(completions):
    if "bad" in completions: os._exit(3)
    return [1.0] * len(completions)
def one_hangs(completions):
    if "bad" in completions: time.sleep(3600)
    return [1.0] * len(completions)
def short(completions): return [1.0]
def no_number(completions): return ["x" if each == "bad" else 1.0 for each in completions]
def none(completions): return [None if each == "bad" else 1.0 for each in completions]
async def at_once(completions, **kwargs): return [1.0 for _ in completions]
async def waits(text, answer):
    import asyncio
    if text == "bad": await asyncio.sleep(3600)
    return 1.0
def needs(completions, colour): return [0.0]
def asks(completions, trainer_state): return [0.0]
class Unmade:
    def __init__(self, model): pass
    def __call__(self, text, answer): return 0.0
"""


@pytest.fixture
def odd(tmp_path: Path) -> str:
    (tmp_path / "odd.py").write_text(ODD, encoding="utf-8")
    return f"{tmp_path}/odd.py"


@each_case(
    ("name", "failure", "others"),
    [
        ("one_raises", "ValueError: mine", 1.0),
        ("one_ends", "its worker process died 2 times: exit code 3", 1.0),
        ("one_hangs", "no verdict in 1 s", 1.0),
        ("waits", "no verdict in 1 s", 1.0),
        ("no_number", "UnusableReward: returned 'x' (str), neither a number nor a Verdict", 1.0),
        ("none", "UnusableReward: returned None; a function must apply to every response", 1.0),
        ("short", "UnusableReward: returned 1 rewards for 3 completions", 0.0),
    ],
)
def test_one_response_of_a_batch_is_to_blame(odd: str, name: str, failure: str, others: float) -> None:
    limit_s = 1.0 if failure == "no verdict in 1 s" else HANG_S  # what ends must end on a slow machine too
    reward = RewardConfig(function=f"{odd}:{name}", workers=1, timeout_s=limit_s)
    with closing(RewardJudge(reward, {"own"}, None, lambda line: None)) as judging:
        verdicts = judging.judge.verdicts(items(["good", "bad", "fine"]))
    assert verdicts[1].detail == failure and verdicts[1].reward == 0.0 and verdicts[1].outcome is not Outcome.CORRECT
    assert [verdicts[0].reward, verdicts[2].reward] == [others] * 2


def test_trl_style_sees_messages_where_the_prompt_is_messages(odd: str) -> None:
    for name, turns in (("seen", CHAT), ("texts", ())):
        own = OwnReward((OwnFunction(f"{odd}:{name}"),))
        assert [each.reward for each in own.verdicts(items(["good", "bad"], turns))] == [1.0, 0.0]
    assert [each.reward for each in OwnReward((OwnFunction(f"{odd}:at_once"),)).verdicts(items(TEXTS))] == [1.0] * 3


@each_case(
    ("name", "message"),
    [
        ("needs", r"needs the column colour, which no row of mine.jsonl has; columns there: answer, level, question$"),
        ("asks", r"asks for trainer_state, which is not handed over so; give it a default"),
        ("Unmade", r"class .*odd.py:Unmade is made without arguments, which it does not allow"),
    ],
)
def test_what_cannot_be_called_is_refused_in_one_line(odd: str, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        training_items([ITEM], RewardConfig(function=f"{odd}:{name}"))


def test_responses_to_one_prompt_stay_together(odd: str) -> None:
    own = {"own": OwnReward((OwnFunction(f"{odd}:texts"),))}
    asked = [Item("own", "", ITEM.answer, str(number // 50)) for number in range(150)]
    assert [len(batch) for batch in batches(asked, own, 150)] == [100, 50] and BATCH == 64
    assert [len(batch) for batch in batches(asked, own, 10)] == [50, 50, 50]
    assert [len(batch) for batch in batches(asked[:2], {}, 2)] == [1, 1]


def test_a_reward_is_found_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "beside_the_run.py").write_text("def right(text, answer): return 1.0\n")
    reward = RewardConfig(function="beside_the_run:right", workers=1)
    training_items([ITEM], reward, str(tmp_path / "run.yaml"))
    assert [verdict.reward for verdict in judged(reward, items(["x"]))] == [1.0]
