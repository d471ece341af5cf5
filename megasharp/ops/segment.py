"""Reductions over the tokens of each sequence of a packed batch, and the way back from sequences to tokens.

`seq_T` (int64) names the sequence, from 0 to `num_segments - 1`, that each token belongs to; tokens of one
sequence need not be neighbours. Everything is differentiable with respect to the floating-point inputs.
"""

from __future__ import annotations

from torch import Tensor


def segment_sum(x_T: Tensor, seq_T: Tensor, num_segments: int) -> Tensor:
    """Sum of `x_T` per segment: shape [num_segments], dtype of `x_T`; a segment without tokens gives 0.

    Example: `segment_sum([1., 2., 4.], [0, 0, 2], 3) == [3., 0., 4.]`.
    Raises IndexError or RuntimeError (from torch) where `seq_T` names a segment that does not exist.
    """
    return x_T.new_zeros(num_segments).index_add(0, seq_T, x_T)


def segment_mean(x_T: Tensor, seq_T: Tensor, num_segments: int, weight_T: Tensor | None = None) -> Tensor:
    """Mean of `x_T` per segment, weighted by the non-negative `weight_T` if given (a 0/1 mask, for instance).

    Shape [num_segments], dtype of `x_T`. A segment without tokens, or with weights that are all 0, gives 0
    and passes no gradient. Example: `segment_mean([1., 2., 4.], [0, 0, 2], 3) == [1.5, 0., 4.]`.
    """
    weight_T = x_T.new_ones(x_T.shape) if weight_T is None else weight_T.to(x_T.dtype)
    weight_S = segment_sum(weight_T, seq_T, num_segments)
    total_S = segment_sum(x_T * weight_T, seq_T, num_segments)
    return total_S / weight_S.masked_fill(weight_S == 0, 1)


def segment_broadcast(x_S: Tensor, seq_T: Tensor) -> Tensor:
    """Each token's own segment's value, `x_S[seq_T]`: shape [T], dtype of `x_S`.

    Example: `segment_broadcast([3., 0., 4.], [0, 0, 2]) == [3., 3., 4.]`.
    """
    return x_S.index_select(0, seq_T)
