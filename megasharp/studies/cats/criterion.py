"""Corollary 3.2's ratio R of every training step, beside what the step does to Siamese on the held-out input.

2601.15609 section 3.3: over-sharpening at a related query happens where R is large, if some mode of it is in the batch
and another one is not. Here the related input is the Siamese one (Mid similarity), the mode in the batch is Cat or
Persian, whichever has the larger R, and the one outside is Siamese. With advantages A and |A| as wanted shifts,

    R = (sum of |A| of the mode / sum of all |A|) (a / b + G - 1) - n

for a mode sampled n times. The logits of a linear classifier have a diagonal kernel: b = 0, and R is infinite for any
mode that was sampled. So a / b is a free parameter here, and R is used as what the paper says it is, a measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megasharp.studies.bounds.coupling import uniform_suppression_ratio
from megasharp.studies.cats.claims import held_out_policy
from megasharp.studies.cats.experiments import (
    CORRECT,
    DISTINCT_ESTIMATORS,
    PLAIN,
    SHIFTS,
    SIAMESE,
    Setting,
    advantages,
    rewards,
    train,
)
from megasharp.studies.claims import settle, standard_error
from megasharp.studies.softmax import Bools, Counts, Floats, sample, uniforms
from megasharp.studies.study import Cell, Claim, Outcome, Table

ALIGNMENTS = (2.0, 10.0, 1000.0)
# In groups of two with centred advantages R is the same at every step that has one.
GROUP_SIZES = (8, 32)
SIMILARITY = "Mid"
# A rank correlation of fewer steps says nothing.
FEWEST = 10


@dataclass(frozen=True, slots=True, eq=False)
class Criterion:
    """One training's steps, [R, T], where R is defined (`valid_RT`).

    `loss_RT`: by how much log p(Siamese) of the Siamese input falls in the step. `ratio_RT`: R by a / b.
    """

    valid_RT: Bools
    loss_RT: Floats
    ratio_RT: Mapping[float, Floats]

    def correlation_R(self, alignment: float) -> Floats:
        """Return each seed's rank correlation of R and the loss; 0 where too few steps or one value of R are there."""
        found = []
        for valid_T, loss_T, ratio_T in zip(self.valid_RT, self.loss_RT, self.ratio_RT[alignment], strict=True):
            found.append(rank_correlation(ratio_T[valid_T], loss_T[valid_T]))
        return np.array(found)

    def losing(self, alignment: float, large: bool) -> float:
        """Return the share of steps with R above 1 (or not above it) in which Siamese loses; NaN without such steps."""
        chosen_RT = self.valid_RT & ((self.ratio_RT[alignment] > 1.0) == large)
        return float((self.loss_RT[chosen_RT] > 0).mean()) if chosen_RT.any() else float("nan")


Criteria = Mapping[Setting, Criterion]


def rank_correlation(one: Floats, other: Floats) -> float:
    """Return Spearman's rank correlation, ties at their mean rank; 0 for fewer than FEWEST values or a constant."""
    if len(one) < FEWEST or one.min() == one.max() or other.min() == other.max():
        return 0.0
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(value: Floats) -> Floats:
    _, place, count = np.unique(value, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2.0)[place])


def settings() -> list[Setting]:
    """List the settings that are looked at."""
    return [replace(PLAIN, estimator=e, group_size=g) for e in DISTINCT_ESTIMATORS for g in GROUP_SIZES]


def run_criteria(seeds: Sequence[int]) -> Criteria:
    """Train every setting and compare its steps."""
    return {setting: criterion(setting, seeds) for setting in settings()}


def criterion(setting: Setting, seeds: Sequence[int]) -> Criterion:
    """Train, draw the labels of every step again, and compute R and Siamese's loss of each."""
    policy_RTV = train(setting, seeds).policy_RTV
    uniform_RTG = uniforms(seeds, setting.steps, setting.group_size)
    steps = range(policy_RTV.shape[1] - 1)
    label_RTG = np.stack([sample(policy_RTV[:, step], uniform_RTG[:, step]) for step in steps], axis=1)
    log_RT = np.log(held_out_policy(policy_RTV, SHIFTS[SIMILARITY])[:, :, SIAMESE])
    shift_RTG = np.abs(advantages(setting.estimator, rewards(label_RTG)))
    total_RT = shift_RTG.sum(axis=-1)
    seen_RT = np.isin(label_RTG, CORRECT).any(axis=-1) & (label_RTG != SIAMESE).all(axis=-1)
    return Criterion(
        valid_RT=seen_RT & (total_RT > 0),
        loss_RT=log_RT[:, :-1] - log_RT[:, 1:],
        ratio_RT={alignment: largest_ratio(label_RTG, shift_RTG, alignment) for alignment in ALIGNMENTS},
    )


def largest_ratio(label_RTG: Counts, shift_RTG: Floats, alignment: float) -> Floats:
    """Return the larger R of both correct labels, of those that were sampled; -infinity where none was."""
    total_RT = np.maximum(shift_RTG.sum(axis=-1), np.finfo(np.float64).tiny)
    largest_RT = np.full(total_RT.shape, -np.inf)
    for label in CORRECT:
        own_RTG = label_RTG == label
        count_RT = own_RTG.sum(axis=-1).astype(np.float64)
        share_RT = (shift_RTG * own_RTG).sum(axis=-1) / total_RT
        group = np.asarray(float(label_RTG.shape[-1]))
        ratio_RT = uniform_suppression_ratio(share_RT, np.asarray(alignment), group, count_RT)
        largest_RT = np.maximum(largest_RT, np.where(count_RT > 0, ratio_RT, -np.inf))
    return largest_RT


def criterion_table(criteria: Criteria) -> Table:
    """Tabulate correlations, and how often Siamese loses on either side of R = 1."""
    lines: list[tuple[Cell, ...]] = []
    for setting, found in criteria.items():
        for alignment in ALIGNMENTS:
            correlation_R = found.correlation_R(alignment)
            losing = [found.losing(alignment, large) for large in (True, False)]
            lines.append(
                (
                    setting.estimator,
                    setting.group_size,
                    alignment,
                    float(correlation_R.mean()),
                    standard_error(correlation_R),
                    *("no steps" if np.isnan(share) else share for share in losing),
                )
            )
    columns = ("estimator", "G", "a/b", "rank correlation", "standard error", "loses, R > 1", "loses, R <= 1")
    title = f"Corollary 3.2's R of a step and Siamese's loss in it (held-out input, similarity {SIMILARITY})"
    return Table("criterion", title, columns, tuple(lines))


def criterion_claims(criteria: Criteria) -> tuple[Claim, ...]:
    """Judge R as a measure of the loss, and as a threshold of it."""
    return (_measure(criteria), _threshold(criteria))


def _measure(criteria: Criteria) -> Claim:
    cases, shown = [], []
    for alignment in ALIGNMENTS:
        correlation_CR = np.stack([found.correlation_R(alignment) for found in criteria.values()])
        # One case for each a/b: 24 would show a clear opposite by chance.
        cases.append(correlation_CR.mean(axis=0))
        mean_C = correlation_CR.mean(axis=1)
        shown.append(f"{cases[-1].mean():+.2f} ({mean_C.min():+.2f} to {mean_C.max():+.2f}) at a/b {alignment:g}")
    sizes = " and ".join(map(str, GROUP_SIZES))
    ours = f"rank correlation over a run's steps, mean of estimators and G={sizes} (their range): {'; '.join(shown)}"
    statement = "the larger R, the more an unseen mode of a related query loses"
    return Claim("3.3", statement, "grows", ours, settle(cases))


def _threshold(criteria: Criteria) -> Claim:
    pairs = [
        (found.losing(alignment, True), found.losing(alignment, False))
        for found in criteria.values()
        for alignment in ALIGNMENTS
    ]
    both = [(large, small) for large, small in pairs if not np.isnan(large + small)]
    fewer = sum(small < large / 2.0 for large, small in both)
    either = [share for pair in pairs for share in pair if not np.isnan(share)]
    ours = (
        f"Siamese loses in {min(either):.0%} to {max(either):.0%} of the steps on either side of R = 1; less than half "
        f"as often below it in {fewer} of the {len(both)} cases with both"
    )
    verdict = Outcome.DIFFERS if not fewer else Outcome.REPRODUCED if fewer == len(both) else Outcome.PARTLY
    return Claim(
        "3.3", "over-sharpening at the related query occurs where R is large", "when R is large", ours, verdict
    )
