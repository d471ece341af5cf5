"""maj@k: how often the answer that most of k samples give is correct.

Self-consistency (Wang et al. 2023, https://arxiv.org/abs/2203.11171, section 2), as an expectation over k of the n
samples drawn without replacement, as pass@k is. Responses without an answer do not vote; where none of the k votes, the
vote is lost. A tie is broken at random: it counts as the share of correct ones among the tied answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megasharp.evals.answers import Answers

# Orders in which a problem's samples are drawn. With orders of each problem's own they put a suite's maj@k off by at
# most 0.5 / sqrt(orders x problems), one standard deviation: 0.004 with 256 problems.
ORDERS = 64


def majority_at_k(answers: Answers, ks: Sequence[int], seed: int | Sequence[int], orders: int = ORDERS) -> list[float]:
    """maj@k of one problem for each k, each at most the number of its judged samples.

    Exact for k = 1 and for k = n; between, the mean over `orders` random orders of the samples, whose first k are the
    draw. `seed`, one or several whole numbers, fixes the orders.
    """
    total = answers.total
    assert all(1 <= k <= total for k in ks), (ks, total)
    exact = {1: _single(answers), total: _vote(np.array([answers.counts]), answers)[0] if answers.counts else 0.0}
    between = sorted(set(ks) - exact.keys())
    if between and (len(answers.counts) > 1 or answers.invalid):
        exact |= _sampled(answers, between, seed, orders)
    # Every sample is the one answer there is.
    return [exact.get(k, exact[total]) for k in ks]


def _single(answers: Answers) -> float:
    right = sum(count for count, correct in zip(answers.counts, answers.correct, strict=True) if correct)
    return right / answers.total


def _sampled(answers: Answers, ks: Sequence[int], seed: int | Sequence[int], orders: int) -> dict[int, float]:
    """maj@k by drawing: `orders` permutations of the samples, whose votes are counted from one k to the next."""
    classes = len(answers.counts)
    labels = np.repeat(np.arange(classes + 1), (*answers.counts, answers.invalid))
    generator = np.random.default_rng(seed)
    order_RN = generator.permuted(np.broadcast_to(labels, (orders, len(labels))), axis=1)
    offset_R1 = np.arange(orders)[:, None] * (classes + 1)
    votes_RC = np.zeros((orders, classes + 1), dtype=np.int64)
    found: dict[int, float] = {}
    drawn = 0
    for k in ks:
        more = (order_RN[:, drawn:k] + offset_R1).ravel()
        votes_RC += np.bincount(more, minlength=votes_RC.size).reshape(votes_RC.shape)
        drawn = k
        found[k] = float(_vote(votes_RC[:, :classes], answers).mean())
    return found


def _vote(votes_RC: NDArray[np.int64], answers: Answers) -> NDArray[np.float64]:
    """[R]: the share of correct answers among those with most votes; 0 where nobody voted."""
    if not votes_RC.shape[1]:
        return np.zeros(len(votes_RC))
    most_R1 = votes_RC.max(axis=1, keepdims=True)
    tied_RC = (votes_RC == most_R1) & (most_R1 > 0)
    right_R = (tied_RC & np.array(answers.correct)).sum(axis=1)
    shares_R: NDArray[np.float64] = right_R / np.maximum(tied_RC.sum(axis=1), 1)
    return shares_R
