"""Section 4.7 of 2511.19942: do objectives of pass@k raise the gradient's variance? Exactly, on random bandits.

A bandit has three right and three wrong responses. All groups are enumerated, so the mean and the variance of the
gradient 1/G sum A_i (one_hot(a_i) - pi) with respect to the logits are sums. GRPO, PKPO (2505.15201) and GR-PKPO
(2508.10751's analytical advantage) give advantages by the number c of right responses alone; right responses then keep
their proportions in the mean, and so do wrong ones. Hence all three have one expected direction, that of pass@1's
gradient, and differ in its length and in the noise around it [DERIVED]. Two variances are compared with GRPO's: as it
is (at one learning rate), and over the squared length of the mean (at steps of one mean length).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb

import numpy as np
from numpy.random import Generator

from megasharp.studies.claims import outcome
from megasharp.studies.softmax import Floats, groups
from megasharp.studies.study import Cell, Claim, Outcome, Table

RIGHT = WRONG = 3
# The paper's Countdown runs have five rollouts; eight are common.
GROUP_SIZES = (5, 8)
# Lost in the paper's text. 4 is a usual value, 2 the least that differs from GRPO.
SUBSETS = (2, 4)
ACCURACIES = (0.1, 0.3, 0.5, 0.7, 0.9)
POLICIES = 20
# As in the methods: keeps nearly equal groups finite.
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Estimator:
    """An objective of a comparison; `k` responses stand for one attempt (1: pass@1)."""

    name: str
    k: int


GRPO = Estimator("GRPO", 1)
RIVALS = tuple(Estimator(name, k) for name in ("PKPO", "GR-PKPO") for k in SUBSETS)


@dataclass(frozen=True, slots=True)
class Moments:
    """The gradient's mean [V], and its variance: the mean squared distance from the mean."""

    mean_V: Floats
    variance: float

    @property
    def relative(self) -> float:
        """The variance over the squared length of the mean."""
        return self.variance / float(self.mean_V @ self.mean_V)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One rival's variances over GRPO's, for one policy and group size, and `zeroed` of the rival."""

    rival: Estimator
    group_size: int
    accuracy: float
    plain: float
    relative: float
    zeroed: float


def advantages(estimator: Estimator, group_size: int) -> tuple[Floats, Floats]:
    """Return the advantages of right and of wrong responses by the number of right ones, [G + 1] each."""
    right_C, wrong_C = np.zeros(group_size + 1), np.zeros(group_size + 1)
    k = estimator.k
    for right in range(1, group_size):
        wrong, share = group_size - right, right / group_size
        if estimator.name == "PKPO":
            right_C[right] = k / group_size * comb(wrong, k - 1) / comb(group_size - 1, k - 1)
            continue
        if estimator.name == "GRPO":
            deviation = np.sqrt(share * (1.0 - share) * group_size / (group_size - 1))
            right_C[right], wrong_C[right] = 1.0 - share, -share
        else:
            failing = comb(wrong, k) / comb(group_size, k)
            deviation = np.sqrt(failing * (1.0 - failing))
            right_C[right] = failing
            wrong_C[right] = failing - comb(wrong - 1, k - 1) / comb(group_size - 1, k - 1)
        right_C[right], wrong_C[right] = (each[right] / (deviation + EPSILON) for each in (right_C, wrong_C))
    return right_C, wrong_C


def moments(estimator: Estimator, policy_V: Floats, group_size: int) -> Moments:
    """Enumerate all groups; the first RIGHT responses of `policy_V` are the right ones."""
    count_KV, probability_K = groups(policy_V, group_size)
    right_C, wrong_C = advantages(estimator, group_size)
    right_K = count_KV[:, :RIGHT].sum(axis=1).astype(np.int64)
    is_right_V = np.arange(len(policy_V)) < RIGHT
    weight_KV = count_KV * np.where(is_right_V, right_C[right_K, None], wrong_C[right_K, None]) / group_size
    gradient_KV = weight_KV - policy_V * weight_KV.sum(axis=1, keepdims=True)
    mean_V = probability_K @ gradient_KV
    return Moments(mean_V, float(probability_K @ np.square(gradient_KV - mean_V).sum(axis=1)))


def zeroed(estimator: Estimator, accuracy: float, group_size: int) -> float:
    """Return the probability that a right response of a mixed group gets no advantage."""
    right_C, _ = advantages(estimator, group_size)
    others = group_size - 1
    chance_C = np.array([comb(others, c) * accuracy**c * (1.0 - accuracy) ** (others - c) for c in range(others)])
    return float(chance_C[right_C[1:group_size] == 0.0].sum() / chance_C.sum())


def compare(rng: Generator) -> tuple[Ratio, ...]:
    """Compare every rival with GRPO on POLICIES random policies for each accuracy and group size."""
    return tuple(
        Ratio(
            rival,
            size,
            accuracy,
            own.variance / grpo.variance,
            own.relative / grpo.relative,
            zeroed(rival, accuracy, size),
        )
        for accuracy in ACCURACIES
        for policy_V in _policies(accuracy, rng)
        for size in GROUP_SIZES
        for grpo in (moments(GRPO, policy_V, size),)
        for rival in RIVALS
        for own in (moments(rival, policy_V, size),)
    )


def _policies(accuracy: float, rng: Generator) -> Iterator[Floats]:
    for _ in range(POLICIES):
        right, wrong = rng.dirichlet(np.ones(RIGHT)), rng.dirichlet(np.ones(WRONG))
        yield np.concatenate([accuracy * right, (1.0 - accuracy) * wrong])


def tabulate(ratios: Sequence[Ratio]) -> Table:
    """Make the table of both ratios by group size, estimator and accuracy, means over policies."""
    rows: list[tuple[Cell, ...]] = []
    for size in GROUP_SIZES:
        for rival in RIVALS:
            found = [_at(ratios, rival, size, accuracy) for accuracy in ACCURACIES]
            for kind, name in (("zeroed", "zeros"), ("plain", "plain"), ("relative", "relative")):
                cells = [float(np.mean([getattr(ratio, kind) for ratio in each])) for each in found]
                rows.append((f"{rival.name} {rival.k}, G={size}", name, *cells))
    columns = ("objective", "figure", *(f"{accuracy:g}" for accuracy in ACCURACIES))
    title = (
        "section 4.7, by accuracy: chance that a right response of a mixed group gets zero, and the gradient's "
        "variance over GRPO's (plain, and relative to the mean gradient)"
    )
    return Table("variance", title, columns, tuple(rows))


def _at(ratios: Sequence[Ratio], rival: Estimator, size: int, accuracy: float) -> list[Ratio]:
    return [r for r in ratios if (r.rival, r.group_size, r.accuracy) == (rival, size, accuracy)]


def judge(ratios: Sequence[Ratio]) -> tuple[Claim, ...]:
    """Judge section 4.7's sentence in both readings, its reason, and appendix C.2's guess at five rollouts."""
    return _higher(ratios, "plain"), _higher(ratios, "relative"), _zeros(ratios), _rollouts(ratios)


def _higher(ratios: Sequence[Ratio], kind: str) -> Claim:
    above = sum(getattr(ratio, kind) > 1.0 for ratio in ratios)
    shown = []
    for accuracy in ACCURACIES:
        values = [getattr(ratio, kind) for ratio in ratios if ratio.accuracy == accuracy]
        shown.append(f"{min(values):.2g} to {max(values):.2g} at {accuracy:g}")
    how = {"plain": "at one learning rate", "relative": "relative to the mean gradient"}[kind]
    ours = f"over GRPO's, {', '.join(shown)}; above 1 in {above / len(ratios):.0%} of {len(ratios)} cases"
    statement = f"objectives of pass@k raise the gradient's variance ({how})"
    return Claim("sec 4.7", statement, "increases gradient variance", ours, outcome(above, len(ratios)))


def _zeros(ratios: Sequence[Ratio]) -> Claim:
    """Judge whether the variance rises with the chance that a right response gets nothing, accuracy by accuracy."""
    rising, steps, most = 0, 0, 0.0
    for size in GROUP_SIZES:
        for rival in RIVALS:
            found = [_at(ratios, rival, size, accuracy) for accuracy in ACCURACIES]
            points = [(each[0].zeroed, float(np.mean([r.relative for r in each]))) for each in found]
            grown = [(one, other) for one, other in pairwise(points) if other[0] > one[0]]
            rising += sum(other[1] > one[1] for one, other in grown)
            steps, most = steps + len(grown), max(most, *(zero for zero, _ in points))
    never = [f"{r.name} k={r.k}" for r in RIVALS if not any(zeroed(r, 0.5, size) for size in GROUP_SIZES)]
    unzeroed = [r.relative for r in ratios if not r.zeroed and r.accuracy >= 0.5]
    ours = (
        f"in mixed groups it gets none with a chance of up to {most:.2f} ({', '.join(never)}: never); from one "
        f"accuracy to the next the relative variance over GRPO's rises with that chance in {rising} of {steps} steps; "
        f"without zeros it is {np.mean(unzeroed):.3g} from accuracy .5 on"
    )
    statement = "it does so because right responses may get zero"
    # Where nothing is zeroed and the variance is above GRPO's all the same, zeros are not the whole reason.
    other = bool(unzeroed) and float(np.mean(unzeroed)) > 1.0
    verdict = Outcome.PARTLY if other and rising else outcome(rising, steps)
    return Claim("sec 4.7", statement, "zero reward", ours, verdict)


def _rollouts(ratios: Sequence[Ratio]) -> Claim:
    few, many = GROUP_SIZES
    pairs = [
        tuple(float(np.mean([r.relative for r in _at(ratios, rival, size, accuracy)])) for size in (few, many))
        for rival in RIVALS
        if rival.name == "GR-PKPO"
        for accuracy in ACCURACIES
    ]
    worse = sum(one > other for one, other in pairs)
    middle = [_at(ratios, rival, size, 0.5) for rival in RIVALS[-1:] for size in GROUP_SIZES]
    shown = " and ".join(f"{np.mean([r.relative for r in each]):.3g}" for each in middle)
    ours = (
        f"its relative variance over GRPO's is larger at G = {few} than at {many} in {worse} of {len(pairs)} cases; "
        f"{shown} at accuracy .5, k = {SUBSETS[-1]}"
    )
    statement = f"GR-PKPO is unstable for having few rollouts ({few}; read as: they raise its variance most)"
    return Claim("C.2", statement, "hypothesised", ours, outcome(worse, len(pairs)))
