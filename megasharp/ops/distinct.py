"""How many different next tokens K independent rollouts can be expected to draw (2510.14807 Proposition 3).

    E |{y_1, ..., y_K}| = sum_v 1 - (1 - p_v)^K

It needs the whole next-token distribution: a sum over the vocabulary, so that partial sums over shards of it add up.
Nothing here carries a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expected_distinct(logp_V: Tensor, samples: int) -> Tensor:
    """The expected number of distinct tokens among `samples` independent draws; over the last dimension of `logp_V`.

    `logp_V` holds normalised log-probs, natural, any leading shape, any floating dtype (kept); -inf is allowed. A shard
    of the vocabulary gives that shard's part of the sum. Between 1 and min(samples, V) for a whole distribution.

    Example: a fair coin thrown twice shows `2 * (1 - 0.5**2) == 1.5` sides.
    """
    return _seen(logp_V.detach(), samples).sum(dim=-1)


def _seen(logp: Tensor, samples: int) -> Tensor:
    """1 - (1 - p)^samples: the probability that a token appears at all. Exact for tiny p and for p near 1."""
    # log(1 - p) loses all digits of a tiny p in the one form and of a p near 1 in the other.
    log_absent = torch.where(logp < -0.5, torch.log1p(-logp.exp()), torch.log(-torch.expm1(logp)))
    return -torch.expm1(samples * log_absent)
