"""Several tries at a problem of reasoning-gym's: which answer is rewarded, and what is said between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, Verdict
from megasharp.tasks import reasoning_gym
from megasharp.tasks.environment import Observation
from megasharp.tasks.environments import reasoning_gym_tries
from megasharp.tasks.environments.reasoning_gym_tries import ReasoningGymTries
from megasharp.tasks.judge import Item


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge in this process: the sums of these tests are never evaluated."""
    monkeypatch.setattr(reasoning_gym_tries, "_judged", lambda item: reasoning_gym.verify(item.text, item.answer))


def played(answers: Sequence[str], tries: int = 3) -> list[Observation]:
    environment = ReasoningGymTries("chain_sum", {"max_terms": 2}, tries)
    found = [environment.reset({"seed": 7})]
    return found + [environment.step(answer) for answer in answers]


def right_answer() -> str:
    entry = reasoning_gym.problem(
        reasoning_gym.GymAnswer(reasoning_gym.GymDataset("chain_sum", 1, 7, '{"max_terms": 2}'), 0)
    )
    return f"<answer>{entry['answer']}</answer>"


def test_a_wrong_answer_is_told_and_the_right_one_that_follows_is_rewarded() -> None:
    prompt, wrong, unread, right = played(("<answer>1</answer>", "1", right_answer()))
    assert prompt.messages[0][1].endswith("between <answer> and </answer>.")
    assert [one.messages for one in (wrong, unread)] == [
        (("user", "That is wrong. Try again."),),
        (("user", "There is no answer between <answer> and </answer>. Try again."),),
    ]
    assert [(one.reward, one.done) for one in (wrong, unread, right)] == [(0.0, False), (0.0, False), (1.0, True)]
    assert right.info["correct"]


def test_the_last_try_has_the_reward_that_the_task_gives_it() -> None:
    *_, last = played(("<answer>1</answer>",), tries=1)
    alone = reasoning_gym.verify(
        "<answer>1</answer>",
        reasoning_gym.GymAnswer(reasoning_gym.GymDataset("chain_sum", 1, 7, '{"max_terms": 2}'), 0),
    )
    assert alone.outcome is Outcome.WRONG
    assert (last.done, last.reward, last.info["answer"]) == (True, alone.reward, alone.canonical_answer)


def test_a_scorer_that_fails_says_nothing_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
            return [Verdict(Outcome.TIMEOUT, 0.0, failure="no verdict in 30 s")]

    monkeypatch.undo()
    monkeypatch.setattr(reasoning_gym_tries, "_pool", Fails)
    with pytest.raises(RuntimeError, match="no verdict in 30 s"):
        played(("<answer>1</answer>",))


def test_no_tries_and_unknown_data_sets_are_refused() -> None:
    with pytest.raises(UserError, match="tries: at least 1"):
        ReasoningGymTries("chain_sum", tries=0)
    with pytest.raises(UserError, match="no data set 'chain_sums'; is it chain_sum"):
        ReasoningGymTries("chain_sums").reset({"seed": 1})
