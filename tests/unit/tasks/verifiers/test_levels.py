"""Rewards by three levels, over verdicts of every outcome."""

from __future__ import annotations

from cases import each_case

from megasharp.common.records import Outcome, Verdict
from megasharp.config.reward_levels import RewardLevels
from megasharp.tasks.levels import rewarded

LEVELS = RewardLevels(correct=1.0, well_formed=0.1, other=-0.5)


@each_case(
    ("outcome", "own", "reward"),
    [
        (Outcome.CORRECT, 1.0, 1.0),
        (Outcome.WRONG, 0.0, 0.1),
        # A verifier's score in between, and tags around no expression.
        (Outcome.WRONG, 0.7, 0.1),
        (Outcome.FORMAT, 0.1, 0.1),
        (Outcome.FORMAT, 0.0, -0.5),
        (Outcome.ERROR, 0.0, -0.5),
        (Outcome.TIMEOUT, 0.0, -0.5),
        # It is masked: no reward of its counts.
        (Outcome.INFRA, 0.0, 0.0),
    ],
)
def test_a_reward_is_that_of_its_level(outcome: Outcome, own: float, reward: float) -> None:
    verdict = Verdict(outcome, own, "3", "why")
    assert rewarded(verdict, LEVELS) == Verdict(outcome, reward, "3", "why")


def test_levels_are_one_and_zero_where_nothing_is_said() -> None:
    rewards = [rewarded(Verdict(outcome, 0.0), RewardLevels()).reward for outcome in Outcome]
    assert rewards == [float(outcome is Outcome.CORRECT) for outcome in Outcome]
