"""The importance ratio as the surrogates share it: its bound, its metrics, and a log-prob that follows it."""

from __future__ import annotations

import torch
from torch import Tensor

from megasharp.algos.base import TokenMetric
from megasharp.types import TokenInputs

LOG_RATIO_BOUND = 20.0


def bounded(logr_T: Tensor) -> Tensor:
    """Log-ratios within [-20, 20], so that one stray token cannot overflow the step; no gradient outside."""
    return logr_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def logp_along(x: TokenInputs, logr_T: Tensor) -> Tensor:
    """log pi [T] with the gradient of the log-ratio, so that what other methods made of that gradient is kept."""
    assert x.logp_T is not None
    return x.logp_T.detach() + (logr_T - logr_T.detach())


def ratio_metrics(x: TokenInputs, logr_T: Tensor) -> dict[str, TokenMetric]:
    """`policy/ratio` rho and `policy/kl_old`, the estimate rho - 1 - log rho of KL(pi_old || pi), from bounded log rho.

    Where a method changes the ratio (`gspo`, `bypass`), both speak of the changed one.
    """
    logr_T = logr_T.detach()
    ratio_T = torch.exp(logr_T)
    return {
        "policy/ratio": TokenMetric(ratio_T, x.mask_T),
        "policy/kl_old": TokenMetric(ratio_T - 1.0 - logr_T, x.mask_T),
    }


def clip_metrics(x: TokenInputs, too_high_T: Tensor, too_low_T: Tensor) -> dict[str, TokenMetric]:
    """`policy/clip_high` and `policy/clip_low`: shares of tokens whose ratio a bound acted on; bool [T] each."""
    return {
        "policy/clip_high": TokenMetric(too_high_T.to(x.mask_T.dtype), x.mask_T),
        "policy/clip_low": TokenMetric(too_low_T.to(x.mask_T.dtype), x.mask_T),
    }
