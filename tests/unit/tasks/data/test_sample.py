"""Seeded samples of a suite's problems."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megasharp.common.errors import UserError
from megasharp.evals.suites import load_suite
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.stream import sampled

ITEMS = [TaskItem(f"p{n}", "countdown", "1 2=3:", CountdownAnswer((1, 2), 3), "t.jsonl") for n in range(1172)]
FILES = Path(__file__).parent / "files" / "sets"


def test_a_sample_keeps_the_order_repeats_nothing_and_grows_with_its_limit() -> None:
    few, many = sampled(ITEMS, 128, 3), sampled(ITEMS, 400, 3)
    numbers = [int(item.id[1:]) for item in few]
    assert numbers == sorted(set(numbers)) and len(few) == 128
    assert set(few) <= set(many)
    assert few == sampled(ITEMS, 128, 3) != sampled(ITEMS, 128, 4)
    assert sampled(ITEMS, None, 3) == sampled(ITEMS, len(ITEMS), 3) == ITEMS


def test_every_problem_is_as_likely_as_any_other() -> None:
    """2,000 samples of 3 of 12: each is drawn 500 times in the mean, with a standard deviation of 19.4."""
    drawn = Counter(item.id for seed in range(2000) for item in sampled(ITEMS[:12], 3, seed))
    assert all(abs(count - 500) < 5 * 19.4 for count in drawn.values()) and len(drawn) == 12


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match=r"limit: 13 of 12 problems of t.jsonl cannot be drawn"):
        sampled(ITEMS[:12], 13, 0)


def test_a_suite_of_a_set_with_a_limit_a_seed_and_another_prompt(tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text(f"set: arc_c\npath: {FILES / 'arc_c.jsonl'}\nlimit: 4\nseed: 2\n")
    suite = load_suite(str(tmp_path / "some.yaml"))
    assert (suite.name, suite.task, len(suite.items)) == ("some", "choice", 4)
    other = load_suite(str(tmp_path / "some.yaml"), seed=5, limit=3, prompt="plain")
    assert len(other.items) == 3 and other.items[0].text.startswith("Which is a metal?")
    assert {item.id for item in other.items} != {item.id for item in suite.items}
    with pytest.raises(UserError, match=r"some.yaml: limit: 40 of 10 problems"):
        load_suite(str(tmp_path / "some.yaml"), limit=40)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("set: math500\ntask: math\n", "task is for rows of your own or a task.s file, not for set"),
        ("limit: 3\n", "give path, with rows of your own"),
        ("set: math500\nprompt: plan\n", "prompt: no template 'plan'; did you mean plain"),
        ("set: math501\npath: some.yaml\n", "no data set 'math501'; did you mean math500"),
        ("set: math500\nlimit: 0\n", "limit: expected integer >= 1"),
    ],
)
def test_a_wrong_suite_of_a_set_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_suite(str(tmp_path / "some.yaml"))
    assert "\n" not in str(caught.value)
