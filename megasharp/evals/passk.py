"""The unbiased estimate of pass@k, stable for any number of samples.

Source: Chen et al. 2021 (https://arxiv.org/abs/2107.03374), equation 1: with `c` of `n` samples correct,
pass@k = 1 - C(n - c, k) / C(n, k), the chance that k samples drawn without replacement hold a correct one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megasharp.errors import UserError


def pass_at_k(n: int, correct: int, k: int) -> float:
    """pass@k of one problem of which `correct` of `n` samples are correct.

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
    """The mean of `pass_at_k` over problems; `n` is one number of samples for all, or one per problem.

    Raises:
        UserError: as `pass_at_k` does.
    """
    assert correct_counts, "no problems to average over"
    samples = [n] * len(correct_counts) if isinstance(n, int) else n
    # Many problems share their counts, and a count's estimate takes up to k factors.
    tally = Counter(zip(samples, correct_counts, strict=True))
    total = sum(times * pass_at_k(each_n, correct, k) for (each_n, correct), times in tally.items())
    return total / len(correct_counts)
