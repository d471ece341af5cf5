"""Dynamic sampling: groups that cannot train are replaced by further prompts (DAPO, arXiv 2503.14476).

A group whose rewards are all equal has no advantage under a group baseline. It is dropped with the reason `uniform`,
and more prompts are sampled until the step is full or `max_rounds` rounds were sampled, the first included.

Printed: 0 < number of correct responses < G for every group of a step. From public code: at most 10 rounds. What is
compared are the verdicts' rewards, before any method reshapes them; with rewards of 1 and 0 that is the printed rule.
Departures from public code: a step that is still not full trains on what there is, where verl stops with an error;
further rounds ask for as many prompts as seem to be missing, where it samples three times the batch each time; and
groups with a single scored response are dropped.
Degenerate case: a step without any such group is sampled in one round and changed in nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from megasharp.algos.base import Method, MethodParams, Needs
from megasharp.algos.group_statistics import rewards_of, uniform
from megasharp.common.records import Group

REASON = "uniform"


class DynamicSamplingParams(MethodParams):
    """`max_rounds` is the largest number of sampling rounds in a step; 1 drops groups without replacing them."""

    max_rounds: int = Field(
        default=10,
        ge=1,
        description="Number of rounds of prompts that a step may sample in all, the first included; then it trains on "
        "what it has. 1: groups are dropped and not replaced.",
    )


class DynamicSampling(Method[DynamicSamplingParams]):
    """Keeps groups whose rewards differ."""

    paper = "2503.14476"
    options = "groups whose rewards are all equal are replaced by other prompts."
    Params = DynamicSamplingParams

    def needs(self) -> Needs:
        """Ask for `max_rounds` - 1 further rounds of prompts in place of dropped groups."""
        return Needs(refill_rounds=self.params.max_rounds - 1)

    def select(self, groups: Sequence[Group]) -> list[str | None]:
        """Drop as `uniform` each group with equal verdicts' rewards, or fewer than two of them (2503.14476)."""
        return [REASON if uniform(rewards_of(group)) else None for group in groups]
