"""Three levels of reward, `reward.levels`, over the verdicts of tasks' verifiers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megasharp.common.records import Outcome, Verdict
from megasharp.config.reward_levels import RewardLevels
from megasharp.tasks.judge import Item, Judge
from megasharp.tasks.own_reward import is_own


@dataclass(frozen=True, slots=True)
class LevelsJudge:
    """A judge whose verdicts have the rewards of `levels`, but for those of a user's own functions."""

    judge: Judge
    levels: RewardLevels

    @property
    def tasks(self) -> Collection[str]:
        """The tasks whose responses it can judge."""
        return self.judge.tasks

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        """Return a verdict for each item, in order; only its reward may differ from the verifier's."""
        pairs = zip(items, self.judge.verdicts(items), strict=True)
        return [verdict if is_own(item.task) else rewarded(verdict, self.levels) for item, verdict in pairs]


def rewarded(verdict: Verdict, levels: RewardLevels) -> Verdict:
    """Return the verdict with the reward of its level; one that is masked (INFRA) as it is.

    What earns anything of its verifier without being right is well-formed: Countdown's tags around no expression are
    FORMAT and do.

    Example: `rewarded(Verdict(Outcome.WRONG, 0.0), RewardLevels(well_formed=0.1))` is `Verdict(Outcome.WRONG, 0.1)`.
    """
    if verdict.outcome is Outcome.INFRA:
        return verdict
    if verdict.outcome is Outcome.CORRECT:
        return replace(verdict, reward=levels.correct)
    formed = verdict.outcome is Outcome.WRONG or verdict.reward > 0.0
    return replace(verdict, reward=levels.well_formed if formed else levels.other)
