"""How many different next tokens K independent rollouts can be expected to draw (2510.14807 Proposition 3).

    E |{y_1, ..., y_K}| = sum_v 1 - (1 - p_v)^K

It needs the whole next-token distribution: a sum over the vocabulary, so that partial sums over shards of it add up.
From the top N candidates alone only bounds follow (derived, ours), K times the missing mass apart at most.
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


def expected_distinct_bounds(topn_logp_N: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The least and the most that `expected_distinct` can be, given the N largest log-probs in descending order.

    The tail's mass is 1 minus theirs and none of its tokens exceeds the N-th candidate. The expectation is concave in
    each probability: least with the tail in as few tokens as that cap allows, most (`samples` times the mass) with the
    tail spread infinitely thin. Shapes and dtype as in `expected_distinct`.
    """
    logp_N = topn_logp_N.detach()
    head = _seen(logp_N, samples).sum(dim=-1)
    tail = (1.0 - logp_N.exp().sum(dim=-1)).clamp_min(0.0)
    cap_logp = logp_N[..., -1]
    cap = cap_logp.exp()
    full = torch.where(cap > 0, tail / cap, 0.0).floor()
    rest = (tail - full * cap).clamp_min(0.0)
    least = full * _seen(cap_logp, samples) + _seen(rest.log(), samples)
    return head + least, head + samples * tail


def _seen(logp: Tensor, samples: int) -> Tensor:
    """1 - (1 - p)^samples: the probability that a token appears at all. Exact for tiny p and for p near 1."""
    # log(1 - p) loses all digits of a tiny p in the one form and of a p near 1 in the other.
    log_absent = torch.where(logp < -0.5, torch.log1p(-logp.exp()), torch.log(-torch.expm1(logp)))
    return -torch.expm1(samples * log_absent)
