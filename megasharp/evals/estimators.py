"""Estimators of a suite's metrics, and their intervals.

Every metric of a suite is the mean of a column: one value per problem, NaN where a problem has none. So one function
averages, one gives intervals, and the difference of two models is the difference of their columns.

pass@k is the unbiased estimate of Chen et al. 2021 (https://arxiv.org/abs/2107.03374), equation 1: with `c` of `n`
samples correct, pass@k = 1 - C(n - c, k) / C(n, k), the chance that k samples drawn without replacement hold a correct
one. maj@k is self-consistency (Wang et al. 2023, https://arxiv.org/abs/2203.11171, section 2): the chance that the
answer that most of k samples give is correct, as an expectation over k of the n samples drawn without replacement, as
pass@k is. Responses without an answer do not vote; where none of the k votes, the vote is lost. A tie is broken at
random: it counts as the share of correct ones among the tied answers.

Intervals come from resampling problems. A metric such as pass@k of a suite is the mean over problems of an estimate
made from each problem's own samples. Its uncertainty has two parts: which problems the suite has, and which samples the
model drew. Resampling problems, each with the estimate it has, holds both: the estimates already scatter by their
samples. Samples within a problem are therefore NOT resampled as well. That would count them twice, and, worse, an
estimate made of resampled samples is biased where k is close to n: a problem solved once in n has pass@n = 1, but a
resample misses that one sample with probability 1/e. Measured (400 suites of 256 problems, n = 8, success rates of
Beta(0.3, 2), nominal 95%): the interval of pass@8 covers the truth in 93% of the suites when problems are resampled, in
42% when samples within them are too; of pass@1 in 94% and 96%.

They are bias-corrected and accelerated percentiles (BCa; Efron 1987, "Better bootstrap confidence intervals", section
2): the per-problem values are skewed, and with AIME's 30 problems BCa covered 94% where plain percentiles covered 93%
(pass@1: 94% and 92%). They hold for problems like these. Where all problems have the same value, as when every one is
solved, the interval is that point: resampling cannot know what it never saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from megasharp.common.errors import UserError
from megasharp.evals.samples import Answers, ProblemResult

# Float64, of the shape that the name's suffix or the docstring gives.
Values = NDArray[np.float64]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate pass@k of one problem of which `correct` of `n` samples are correct (2107.03374, equation 1).

    C(n - c, k) / C(n, k) is a product of c factors (n - k - j) / (n - j), and equally one of k factors
    (n - c - j) / (n - j): the shorter one is summed in logarithms, so nothing overflows and small values of
    pass@k keep their relative precision.

    Example: `pass_at_k(4, 1, 2) == 0.5`.

    Raises:
        UserError: `k` is below 1 or above `n`.
    """
    assert 0 <= correct <= n, (correct, n)
    if k < 1:
        raise UserError(f"pass@{k} has no meaning; give k >= 1 (eval.k)")
    if n < k:
        raise UserError(f"{n} samples per problem cannot give pass@{k}; raise eval.n or lower eval.k")
    if correct + k > n:
        return 1.0 if correct else 0.0
    few, many = sorted((correct, k))
    if few <= 1:
        return many / n if few else 0.0
    j = np.arange(few, dtype=np.float64)
    return float(-np.expm1(np.log1p(-many / (n - j)).sum()))


def pass_at_k_mean(correct_counts: Sequence[int], n: int | Sequence[int], k: int) -> float:
    """Average `pass_at_k` over problems; `n` is one number of samples for all, or one per problem.

    Raises:
        UserError: as `pass_at_k` does.
    """
    assert correct_counts, "no problems to average over"
    samples = [n] * len(correct_counts) if isinstance(n, int) else n
    # Many problems share their counts, and a count's estimate takes up to k factors.
    tally = Counter(zip(samples, correct_counts, strict=True))
    total = sum(times * pass_at_k(each_n, correct, k) for (each_n, correct), times in tally.items())
    return total / len(correct_counts)


# Orders in which a problem's samples are drawn. With orders of each problem's own they put a suite's maj@k off by at
# most 0.5 / sqrt(orders x problems), one standard deviation: 0.004 with 256 problems.
ORDERS = 64


def majority_at_k(answers: Answers, ks: Sequence[int], seed: int | Sequence[int], orders: int = ORDERS) -> list[float]:
    """Estimate maj@k of one problem for each k (2203.11171, section 2), each at most the number of its judged samples.

    Exact for k = 1 and for k = n; between, the mean over `orders` random orders of the samples, whose first k are the
    draw. `seed`, one or several whole numbers, fixes the orders.
    """
    total = answers.total
    assert all(1 <= k <= total for k in ks), (ks, total)
    right = sum(count for count, correct in zip(answers.counts, answers.correct, strict=True) if correct)
    all_vote = _vote(np.array([answers.counts]), answers)[0] if answers.counts else 0.0
    exact = {1: right / total, total: all_vote}
    between = sorted(set(ks) - exact.keys())
    if between and (len(answers.counts) > 1 or answers.invalid):
        exact |= _sampled(answers, between, seed, orders)
    # Every sample is the one answer there is.
    return [exact.get(k, exact[total]) for k in ks]


def _sampled(answers: Answers, ks: Sequence[int], seed: int | Sequence[int], orders: int) -> dict[int, float]:
    """maj@k by drawing: `orders` permutations of the samples, whose votes are counted from one k to the next."""
    classes = len(answers.counts)
    # The last class is that of responses without an answer.
    labels = np.repeat(np.arange(classes + 1), (*answers.counts, answers.invalid))
    generator = np.random.default_rng(seed)
    order_RN = generator.permuted(np.broadcast_to(labels, (orders, len(labels))), axis=1)
    offset_R1 = np.arange(orders)[:, None] * (classes + 1)
    votes_RC = np.zeros((orders, classes + 1), dtype=np.int64)
    found: dict[int, float] = {}
    drawn = 0
    for k in ks:
        # One bincount for all orders: each has its own run of classes.
        more = (order_RN[:, drawn:k] + offset_R1).ravel()
        votes_RC += np.bincount(more, minlength=votes_RC.size).reshape(votes_RC.shape)
        drawn = k
        found[k] = float(_vote(votes_RC[:, :classes], answers).mean())
    return found


def _vote(votes_RC: NDArray[np.int64], answers: Answers) -> Values:
    """[R]: the share of correct answers among those with most votes; 0 where nobody voted."""
    if not votes_RC.shape[1]:
        return np.zeros(len(votes_RC))
    most_R1 = votes_RC.max(axis=1, keepdims=True)
    tied_RC = (votes_RC == most_R1) & (most_R1 > 0)
    right_R = (tied_RC & np.array(answers.correct)).sum(axis=1)
    shares_R: Values = right_R / np.maximum(tied_RC.sum(axis=1), 1)
    return shares_R


def columns(rows: Sequence[ProblemResult], ks: Sequence[int], seed: int) -> dict[str, Values]:
    """Compute the metrics' columns by name, [problems] float64 each; those that no problem has are left out.

    Every problem must have at least max(ks) samples. `seed` is for the votes of maj@k.

    - `pass@k`, unbiased; `avg@n` the share of correct samples; `pass@n` whether any sample is correct
    - `maj@k` of verifiers that name every correct answer; `greedy` whether the greedy response is correct
    - `answer_entropy`, `token_entropy`, `token_entropy_sampled`, `lambda_1` ..., `lambda_sample`: as in `samples`
    - `distinct_correct`; with a solver `multiplicity`, the number of solutions, and `solutions_found`, the share of
      them among the samples
    """
    ks = sorted(set(ks))
    lambdas = [row.tokens_seen.lambdas for row in rows]
    found = {f"pass@{k}": _pass_at(rows, k) for k in ks}
    found["avg@n"] = _pass_at(rows, 1)
    found["pass@n"] = np.array([float(row.correct > 0) for row in rows])
    found |= {f"maj@{k}": column for k, column in zip(ks, _majorities(rows, ks, seed), strict=True)}
    found |= {
        "greedy": _column([row.greedy_correct for row in rows]),
        "answer_entropy": _column([row.answers.entropy if row.answers else None for row in rows]),
        "token_entropy": _column([row.tokens_seen.entropy for row in rows]),
        "token_entropy_sampled": _column([row.tokens_seen.entropy_sampled for row in rows]),
        **{
            f"lambda_{n + 1}": _column([each[n] if n < len(each) else None for each in lambdas])
            for n in range(max(map(len, lambdas), default=0))
        },
        "lambda_sample": _column([row.tokens_seen.lambda_sample for row in rows]),
        "distinct_correct": _column([row.distinct_correct for row in rows]),
        "multiplicity": _column([row.solutions for row in rows]),
        "solutions_found": _column([row.share_of_solutions for row in rows]),
    }
    return {name: column for name, column in found.items() if not np.isnan(column).all()}


def columns_of(
    rows: Sequence[ProblemResult], ks: Sequence[int], seed: int, problems: Sequence[str]
) -> dict[str, Values]:
    """Compute `columns` in the order of `problems`, by id; NaN for those with fewer than max(ks) samples."""
    place = {problem: number for number, problem in enumerate(problems)}
    kept = [row for row in rows if row.samples >= max(ks) and row.id in place]
    found = {}
    for name, values in columns(kept, ks, seed).items():
        found[name] = np.full(len(problems), np.nan)
        found[name][[place[row.id] for row in kept]] = values
    return found


def mean_over_runs(values_RP: Values) -> Values:
    """[problems]: the mean over runs of the values that are not NaN; NaN where there is none."""
    known_RP = ~np.isnan(values_RP)
    count_P = known_RP.sum(axis=0)
    total_P = np.where(known_RP, values_RP, 0.0).sum(axis=0)
    mean_P: Values = np.divide(total_P, count_P, out=np.full(total_P.shape, np.nan), where=count_P > 0)
    return mean_P


def by_suite(values: Values, sizes: Sequence[int]) -> list[Values]:
    """Split [..., problems] into the suites that have `sizes` problems, in order; all are of one without sizes."""
    return np.split(values, np.cumsum(sizes)[:-1], axis=-1) if sizes else [values]


def means(table: Mapping[str, Values], sizes: Sequence[int] = ()) -> dict[str, float]:
    """Average each column [problems] over the problems that have the metric, or over the means of suites of `sizes`."""
    return {
        name: float(np.mean([np.nanmean(part) for part in by_suite(column, sizes)])) for name, column in table.items()
    }


def _column(values: Sequence[float | bool | None]) -> Values:
    return np.array([np.nan if value is None else float(value) for value in values])


def _pass_at(rows: Sequence[ProblemResult], k: int) -> Values:
    # Many problems share their counts, and a count's estimate takes up to k factors.
    known = {(row.samples, row.correct): 0.0 for row in rows}
    for n, correct in known:
        known[n, correct] = pass_at_k(n, correct, k)
    return np.array([known[row.samples, row.correct] for row in rows])


def _majorities(rows: Sequence[ProblemResult], ks: Sequence[int], seed: int) -> Values:
    """[ks, problems]; NaN in all of it where some correct answer has no name, so that nobody can vote for it."""
    if any(row.answers is None or row.answers.unnamed for row in rows):
        return np.full((len(ks), len(rows)), np.nan)
    # The same orders for all problems would put them all off to the same side.
    votes = [majority_at_k(row.answers, ks, (seed, crc32(row.id.encode()))) for row in rows if row.answers is not None]
    return np.array(votes).T.reshape(len(ks), len(rows))


RESAMPLES = 2000
LEVEL = 0.95
_NORMAL = NormalDist()
# Resampled weights held at once, in elements: a suite of 12,000 problems takes 16 MB at a time.
_BLOCK = 1 << 21


@dataclass(frozen=True, slots=True)
class Interval:
    """A metric's lower and upper bound. Example: `Interval(0.121, 0.187)`."""

    low: float
    high: float


def mean_intervals(
    values_PF: Values, *, seed: int, resamples: int = RESAMPLES, level: float = LEVEL
) -> list[Interval | None]:
    """Compute a BCa interval for the mean over problems of each column of `values_PF` [problems, metrics].

    NaN stands for a problem without that metric, and is left out of its mean; a column of nothing else has None. All
    columns are resampled alike, so the difference of two models is a column of differences (paired). The same seed
    gives the same bounds.
    """
    return average_intervals([values_PF], seed=seed, resamples=resamples, level=level)


def average_intervals(
    suites: Sequence[Values], *, seed: int, resamples: int = RESAMPLES, level: float = LEVEL
) -> list[Interval | None]:
    """Compute `mean_intervals` of the unweighted average of several suites' means, resampled suite by suite.

    Every suite has its table [problems, metrics] of the same metrics; one that a suite lacks altogether has None.
    """
    draws = [_resampled_means(table_PF, (seed, number), resamples) for number, table_PF in enumerate(suites)]
    means_BF = np.mean(draws, axis=0)
    return [
        _interval([table_PF[~np.isnan(table_PF[:, figure]), figure] for table_PF in suites], means_BF[:, figure], level)
        for figure in range(suites[0].shape[1])
    ]


def _resampled_means(values_PF: Values, seed: tuple[int, int], resamples: int) -> Values:
    """[B, F]: means over problems drawn with replacement; NaN where none that was drawn has the metric."""
    known_PF = ~np.isnan(values_PF)
    filled_PF, known_PF = np.where(known_PF, values_PF, 0.0), known_PF.astype(np.float64)
    problems = len(values_PF)
    generator = np.random.default_rng(seed)
    chances = np.full(problems, 1.0 / problems)
    step = max(1, _BLOCK // problems)
    blocks = []
    for start in range(0, resamples, step):
        times_BP = generator.multinomial(problems, chances, size=min(step, resamples - start)).astype(np.float64)
        counted_BF = times_BP @ known_PF
        sums_BF = times_BP @ filled_PF
        blocks.append(np.divide(sums_BF, counted_BF, out=np.full_like(sums_BF, np.nan), where=counted_BF > 0))
    return np.concatenate(blocks)


def _interval(suites: Sequence[Values], means: Values, level: float) -> Interval | None:
    """BCa of the average over suites of the means of their values, from its resampled values `means` [B].

    Efron 1987: z0, the bias, is the normal quantile of the share of resampled means below the estimate; the bounds are
    the quantiles of equation 2.3.
    """
    if not all(len(values) for values in suites):
        return None
    estimate = float(np.mean([values.mean() for values in suites]))
    means = means[~np.isnan(means)]
    # Influence of each problem on the average, up to a factor that is the same for all.
    influence = np.concatenate([(values - values.mean()) / len(values) for values in suites])
    spread = float((influence**2).sum())
    # Means of equal values differ from each other by rounding alone.
    if spread <= 1e-20 * max(1.0, estimate**2) / len(influence):
        return Interval(estimate, estimate)
    acceleration = float((influence**3).sum()) / (6.0 * spread**1.5)
    # Ties count half; a share of 0 or 1 would have no finite quantile.
    near = np.isclose(means, estimate, rtol=1e-12, atol=1e-15)
    below = float(((means < estimate) & ~near).mean() + 0.5 * near.mean())
    bias = _NORMAL.inv_cdf(min(max(below, 0.5 / len(means)), 1.0 - 0.5 / len(means)))
    shares = []
    for tail in ((1.0 - level) / 2.0, (1.0 + level) / 2.0):
        shifted = bias + _NORMAL.inv_cdf(tail)
        shares.append(_NORMAL.cdf(bias + shifted / (1.0 - acceleration * shifted)))
    low, high = np.quantile(means, shares)
    return Interval(float(low), float(high))
