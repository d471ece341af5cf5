"""Which tokens of a response are gated: those at which the policy is least sure (CaSP, 2510.14807 appendix E.1)."""

from __future__ import annotations

from torch import Tensor

from megasharp.ops.segment import segment_broadcast, segment_quantile
from megasharp.types import TokenInputs

DEFAULT_QUANTILE = 0.8


def gated(x: TokenInputs, quantile: float) -> Tensor:
    """bool [T]: unmasked tokens whose entropy is above the `quantile` of their response's unmasked tokens.

    The comparison is strict, so of equal entropies none passes the threshold they set, and a response of one token is
    not gated. By definition 0 gates every unmasked token, and 1 none.
    """
    assert x.entropy_T is not None
    scored_T = x.mask_T > 0
    if quantile == 0.0:
        return scored_T
    # In float64: a rank that is a whole number must not fall between two tokens by rounding.
    entropy_T = x.entropy_T.detach().double()
    threshold_S = segment_quantile(entropy_T, x.seq_T, x.num_sequences, quantile, x.mask_T)
    return (entropy_T > segment_broadcast(threshold_S, x.seq_T)) & scored_T
