"""Two next-token distributions of one entropy (2510.14807 figure 4c), and Proposition 3 on distributions.

The figure's own numbers are not in the paper's text. Ours: a plateau, three equally probable candidates and no others,
and a peak, one dominant candidate over an even tail, its height solved for the same entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from megasharp.labs.softmax import Array
from megasharp.labs.squeeze.dynamics import VOCABULARY
from megasharp.ops.distinct import expected_distinct

PLATEAU = 3


def plateau() -> Array:
    """Three candidates with a third each, [V]; entropy ln 3."""
    return np.concatenate([np.full(PLATEAU, 1.0 / PLATEAU), np.zeros(VOCABULARY - PLATEAU)])


def peak(entropy: float = math.log(PLATEAU)) -> Array:
    """One candidate above an even tail of all others, with the given entropy in nats (at most ln V), [V]."""
    low, high = 1.0 / VOCABULARY, 1.0
    for _ in range(200):
        middle = (low + high) / 2.0
        # The entropy falls as the top grows from 1/V to 1.
        low, high = (middle, high) if _entropy_of_top(middle) > entropy else (low, middle)
    return with_top(low)


def with_top(top: float) -> Array:
    """A distribution whose rank 1 has `top`, all others the same share of the rest, [V]."""
    return np.concatenate([[top], np.full(VOCABULARY - 1, (1.0 - top) / (VOCABULARY - 1))])


def _entropy_of_top(top: float) -> float:
    rest = 1.0 - top
    spread = rest * math.log(rest / (VOCABULARY - 1)) if rest > 0.0 else 0.0
    return -top * math.log(top) - spread


def distinct(p_V: Array, samples: int) -> float:
    """Proposition 3 by `megasharp.ops.distinct`."""
    return float(expected_distinct(torch.from_numpy(p_V).log(), samples))


def drawn_distinct(p_V: Array, samples: int, draws: int, seed: int) -> float:
    """The same by simulation: the mean number of distinct tokens over `draws` sets of `samples` tokens."""
    counts_DV = np.random.default_rng(seed).multinomial(samples, p_V / p_V.sum(), size=draws)
    return float((counts_DV > 0).sum(axis=-1).mean())


def budgets(p_V: Array, samples: Sequence[int]) -> list[float]:
    """`distinct` for several numbers of samples."""
    return [distinct(p_V, k) for k in samples]
