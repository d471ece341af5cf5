"""Online difficulty filtering: only queries of middling success train (arXiv 2504.03380).

    keep a group iff  low < p < high,   p = share of correct responses among its scored ones

With `drop_easiest`, that share of the groups of one round of sampling, those of the highest p, is dropped as well: the
filtering baseline of 2601.15609 (Table 5), which "discards the easiest 25% of training queries according to their
empirical success rate". Its preset is `{low: null, high: null, drop_easiest: 0.25, max_rounds: 1}`.

Printed: the rule, balanced around 0.5, and that batches keep their size, others being sampled instead. Unknown: the
thresholds (0 and 1 drop what has no advantage anyway); and of the baseline whether "training queries" are those of the
data set before training or of each step, and whether others take their place. Per round is ours.
The number dropped is rounded down; of equally easy groups the first sampled go. A threshold of null is no threshold.
Degenerate cases: a group without a scored response has no p; it is dropped as `unscored` and counts as hardest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from megasharp.algos.base import Method, MethodParams, Needs
from megasharp.algos.group_statistics import correct_of
from megasharp.common.records import Group


class DifficultyFilterParams(MethodParams):
    """Exclusive thresholds of p; share of easiest groups to drop; rounds of prompts that a step may sample in all."""

    low: float | None = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Success rate of a group at or below which it is dropped as too hard. 0 drops groups without a "
        "correct response; null: no lower threshold.",
    )
    high: float | None = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Success rate of a group at or above which it is dropped as too easy. 1 drops groups that are all "
        "correct; null: no upper threshold.",
    )
    drop_easiest: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of the groups of each sampling round to drop, those of the highest success rate, rounded "
        "down. 0.25 with low and high null is the filtering baseline of IAC's paper. 0: none.",
    )
    max_rounds: int = Field(
        default=10,
        ge=1,
        description="Number of rounds of prompts that a step may sample in all to replace dropped groups, the first "
        "included. 1: no replacement.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


class DifficultyFilter(Method[DifficultyFilterParams]):
    """Drops groups that are too hard or too easy."""

    paper = "2504.03380"
    status = "as printed; thresholds unknown"
    options = "groups that are solved too rarely or too often are replaced by other prompts."
    Params = DifficultyFilterParams

    def needs(self) -> Needs:
        """Ask for `max_rounds` - 1 further rounds of prompts in place of dropped groups."""
        return Needs(refill_rounds=self.params.max_rounds - 1)

    def select(self, groups: Sequence[Group]) -> list[str | None]:
        """Keep groups with low < p < high that are not among the easiest of this round (2504.03380).

        The reasons are `unscored`, `too_hard` and `too_easy`.
        """
        correct = [correct_of(group) for group in groups]
        rates = [float(correct_G.mean()) if correct_G.numel() else None for correct_G in correct]
        # A group without a scored response counts as hardest.
        easiest_first = sorted(range(len(groups)), key=lambda i: -1.0 if (p := rates[i]) is None else p, reverse=True)
        easiest = set(easiest_first[: int(self.params.drop_easiest * len(groups))])
        return [self._reason(rate, number in easiest) for number, rate in enumerate(rates)]

    def _reason(self, rate: float | None, easiest: bool) -> str | None:
        if rate is None:
            return "unscored"
        if self.params.low is not None and rate <= self.params.low:
            return "too_hard"
        if easiest or (self.params.high is not None and rate >= self.params.high):
            return "too_easy"
        return None
