"""Reductions of a packed batch: per sequence, over a token's distribution, and of a device's sums to metrics.

The `segment_...` functions reduce over the tokens of each sequence and spread a sequence's value over its tokens.
`seq_T` (int64) names the sequence, from 0 to `num_segments - 1`, that each token belongs to; tokens of one sequence
need not be neighbours. They are differentiable with respect to the floating-point inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megasharp.common.records import Mean


def segment_sum(x_T: Tensor, seq_T: Tensor, num_segments: int) -> Tensor:
    """Sum `x_T` per segment: shape [num_segments], dtype of `x_T`; a segment without tokens gives 0.

    Example: `segment_sum([1., 2., 4.], [0, 0, 2], 3) == [3., 0., 4.]`.
    Raises IndexError or RuntimeError (from torch) where `seq_T` names a segment that does not exist.
    """
    return x_T.new_zeros(num_segments).index_add(0, seq_T, x_T)


def segment_mean(x_T: Tensor, seq_T: Tensor, num_segments: int, weight_T: Tensor | None = None) -> Tensor:
    """Average `x_T` per segment, weighted by the non-negative `weight_T` if given (a 0/1 mask, for instance).

    Shape [num_segments], dtype of `x_T`. A segment without tokens, or with weights that are all 0, gives 0
    and passes no gradient. Example: `segment_mean([1., 2., 4.], [0, 0, 2], 3) == [1.5, 0., 4.]`.
    """
    weight_T = x_T.new_ones(x_T.shape) if weight_T is None else weight_T.to(x_T.dtype)
    weight_S = segment_sum(weight_T, seq_T, num_segments)
    total_S = segment_sum(x_T * weight_T, seq_T, num_segments)
    return total_S / weight_S.masked_fill(weight_S == 0, 1)


def segment_broadcast(x_S: Tensor, seq_T: Tensor) -> Tensor:
    """Give each token its segment's value, `x_S[seq_T]`: shape [T], dtype of `x_S`.

    Example: `segment_broadcast([3., 0., 4.], [0, 0, 2]) == [3., 3., 4.]`.
    Raises IndexError or RuntimeError (from torch) where `seq_T` names a segment that does not exist.
    """
    return x_S.index_select(0, seq_T)


def segment_quantile(x_T: Tensor, seq_T: Tensor, num_segments: int, q: float, mask_T: Tensor | None = None) -> Tensor:
    """Return the q-quantile of each segment's values, interpolated linearly as `torch.quantile` does.

    Shape [num_segments], dtype of `x_T`, `q` in [0, 1]. Tokens where `mask_T` is 0 do not count; a segment without
    others gives 0. Example: `segment_quantile([1., 4., 2., 9.], [0, 0, 0, 2], 3, 0.75) == [3., 0., 9.]`.
    """
    # Masked tokens go to a segment of their own behind all others, where no position below reaches.
    kept_T = seq_T if mask_T is None else seq_T.masked_fill(mask_T == 0, num_segments)
    by_value_T = x_T.argsort()
    order_T = by_value_T[kept_T[by_value_T].argsort(stable=True)]
    # A zero behind the sorted values is what a segment without values reads.
    sorted_T = torch.cat([x_T[order_T], x_T.new_zeros(1)])
    count_S = segment_sum(torch.ones_like(kept_T), kept_T, num_segments + 1)[:num_segments]
    start_S = count_S.cumsum(0) - count_S
    rank_S = q * (count_S - 1).double()
    below_S, above_S = (
        (start_S + step_S.long()).masked_fill(count_S == 0, x_T.numel()) for step_S in (rank_S.floor(), rank_S.ceil())
    )
    return torch.lerp(sorted_T[below_S], sorted_T[above_S], rank_S.frac().to(x_T.dtype))


def expected_distinct(logp_V: Tensor, samples: int) -> Tensor:
    """Return the expected number of distinct tokens among K = `samples` independent draws; without gradient.

    sum_v 1 - (1 - p_v)^K (2510.14807 Proposition 3), over the last dimension of `logp_V`: normalised log-probs,
    natural, any leading shape, any floating dtype (kept); -inf is allowed. A shard of the vocabulary gives that shard's
    part of the sum. Between 1 and min(samples, V) for a whole distribution.

    Example: a fair coin thrown twice shows `2 * (1 - 0.5**2) == 1.5` sides.
    """
    logp_V = logp_V.detach()
    # log(1 - p) loses all digits of a tiny p in the one form and of a p near 1 in the other.
    log_absent_V = torch.where(logp_V < -0.5, torch.log1p(-logp_V.exp()), torch.log(-torch.expm1(logp_V)))
    seen_V = -torch.expm1(samples * log_absent_V)
    return seen_V.sum(dim=-1)


def means_on_host(sums: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Mean]:
    """Read pairs (total, weight) back as metrics: scalars on one device, of any dtypes; exact for integers below 2^53.

    All in one copy, since each copy from a GPU waits until the device is idle.

    Example: `means_on_host({"a": (torch.tensor(3.0), torch.tensor(2))}) == {"a": Mean(3.0, 2.0)}`.
    """
    if not sums:
        return {}
    numbers = torch.stack([value.double() for pair in sums.values() for value in pair]).tolist()
    return {name: Mean(*pair) for name, pair in zip(sums, zip(numbers[::2], numbers[1::2], strict=True), strict=True)}
