"""Every figure of a suite is the mean of a column: one value per problem, NaN where a problem has none.

So one function averages, one gives intervals, and the difference of two models is the difference of their columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from megasharp.evals.majority import majority_at_k
from megasharp.evals.passk import pass_at_k
from megasharp.evals.rows import ProblemResult

Column = NDArray[np.float64]


def columns(rows: Sequence[ProblemResult], ks: Sequence[int], seed: int) -> dict[str, Column]:
    """The columns of `rows` by the figures' names, [problems] float64 each; those that no problem has are left out.

    Every problem must have at least max(ks) samples. `seed` is for the votes of maj@k.

    - `pass@k`, unbiased; `avg@n` the share of correct samples; `pass@n` whether any sample is correct
    - `maj@k` of verifiers that name every correct answer; `greedy` whether the greedy response is correct
    - `answer_entropy`, `token_entropy`, `token_entropy_sampled`, `lambda_1` ..., `lambda_sample`: `rows.ProblemResult`
    - `distinct_correct`; with a solver `multiplicity`, the number of solutions, and `solutions_found`, the share of
      them among the samples
    """
    ks = sorted(set(ks))
    found = {f"pass@{k}": _pass_at(rows, k) for k in ks}
    found["avg@n"] = _pass_at(rows, 1)
    found["pass@n"] = np.array([float(row.correct > 0) for row in rows])
    found |= {f"maj@{k}": column for k, column in zip(ks, _majorities(rows, ks, seed), strict=True)}
    found |= {
        "greedy": _column([row.greedy_correct for row in rows]),
        "answer_entropy": _column([row.answers.entropy if row.answers else None for row in rows]),
        "token_entropy": _column([row.tokens_seen.entropy for row in rows]),
        "token_entropy_sampled": _column([row.tokens_seen.entropy_sampled for row in rows]),
        **_lambdas(rows),
        "lambda_sample": _column([row.tokens_seen.lambda_sample for row in rows]),
        "distinct_correct": _column([row.distinct_correct for row in rows]),
        "multiplicity": _column([row.solutions for row in rows]),
        "solutions_found": _column([row.share_of_solutions for row in rows]),
    }
    return {name: column for name, column in found.items() if not np.isnan(column).all()}


def means(table: Mapping[str, Column]) -> dict[str, float]:
    """Each column's mean over the problems that have the figure."""
    return {name: float(np.nanmean(column)) for name, column in table.items()}


def _column(values: Sequence[float | bool | None]) -> Column:
    return np.array([np.nan if value is None else float(value) for value in values])


def _pass_at(rows: Sequence[ProblemResult], k: int) -> Column:
    # Many problems share their counts, and a count's estimate takes up to k factors.
    known = {(row.samples, row.correct): 0.0 for row in rows}
    for n, correct in known:
        known[n, correct] = pass_at_k(n, correct, k)
    return np.array([known[row.samples, row.correct] for row in rows])


def _majorities(rows: Sequence[ProblemResult], ks: Sequence[int], seed: int) -> Column:
    """[ks, problems]; NaN in all of it where some correct answer has no name, so that nobody can vote for it."""
    if any(row.answers is None or row.answers.unnamed for row in rows):
        return np.full((len(ks), len(rows)), np.nan)
    # The same orders for all problems would put them all off to the same side.
    votes = [majority_at_k(row.answers, ks, (seed, crc32(row.id.encode()))) for row in rows if row.answers is not None]
    return np.array(votes).T.reshape(len(ks), len(rows))


def _lambdas(rows: Sequence[ProblemResult]) -> dict[str, Column]:
    most = max((len(row.tokens_seen.lambdas) for row in rows), default=0)
    return {
        f"lambda_{n + 1}": _column(
            [row.tokens_seen.lambdas[n] if n < len(row.tokens_seen.lambdas) else None for row in rows]
        )
        for n in range(most)
    }
