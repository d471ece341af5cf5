"""Equation 15 of 2510.14807: the mixture of ratios without the stop-gradient correction, beside equation 4.

With gamma = pi(y) / pi_old(y) of the sampled token and gamma^(n) of the N most probable candidates, A = 1:

    naive:     (1 - alpha) gamma + alpha / N sum_n gamma^(n)
    corrected: (1 - alpha) gamma + alpha / N sum_n sg[gamma / gamma^(n)] gamma^(n)

The derivative of either with respect to log pi(v^(n)) is alpha / N times the candidate's importance coefficient:
gamma^(n) in the first, gamma in the second. In the first, then, candidates that have risen since the sampling are
pushed up more than those that have fallen. On policy all of them are 1, and nothing distinguishes the two.

How far a policy is from its sampler is ours: the sampler's logits plus normal noise of a given deviation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# The paper's values for mathematics; ALPHA cancels in all that is reported.
ALPHA, TOPN = 0.01, 3
# Deviation of the logits from the sampler's. At 0.1 the sampled token's ratio is outside of 0.8 to 1.2 in 3 %.
DRIFTS = (0.0, 0.01, 0.1, 0.3)
TRIALS = 2000
CANDIDATES = 50
# Coefficients are equal up to rounding.
EQUAL = 1e-12


@dataclass(frozen=True, slots=True)
class MixtureTrials:
    """Random policies at one distance from their samplers.

    `unequal`: share of trials in which the naive mixture's candidates have different coefficients. `spread`: the
    largest coefficient over the smallest, mean. `gap`: by how much the naive gradient misses the corrected one, as a
    share of the corrected one's smoothing, mean. `error`: the corrected coefficients' largest deviation from gamma,
    relative to it.
    """

    drift: float
    unequal: float
    spread: float
    gap: float
    error: float


def mixture_trials(drift: float, seed: int) -> MixtureTrials:
    """Compare both mixtures by autograd at random policies, tokens sampled from policies `drift` away."""
    rng = np.random.default_rng(seed)
    scale_S1 = rng.uniform(0.5, 4.0, size=(TRIALS, 1))
    old_SV = scale_S1 * rng.normal(size=(TRIALS, CANDIDATES))
    logit_SV = torch.from_numpy(old_SV + drift * rng.normal(size=old_SV.shape))
    old_logp_SV = torch.from_numpy(old_SV).log_softmax(-1)
    token_S = torch.multinomial(old_logp_SV.exp(), 1, generator=torch.Generator().manual_seed(seed))[:, 0]
    top_SN = logit_SV.topk(TOPN, dim=-1).indices
    naive_SN, corrected_SN = (
        coefficients(logit_SV, old_logp_SV, token_S, top_SN, corrected) for corrected in (False, True)
    )
    gamma_S1 = (logit_SV.log_softmax(-1) - old_logp_SV).gather(-1, token_S[:, None]).exp()
    plain_SV, naive_SV, whole_SV = (
        logit_gradient(logit_SV, old_logp_SV, token_S, top_SN, alpha, corrected)
        for alpha, corrected in ((0.0, True), (ALPHA, False), (ALPHA, True))
    )
    # The smoothing is what equation 4 adds to (1 - alpha) of the plain gradient.
    smoothing_S = (whole_SV - (1.0 - ALPHA) * plain_SV).norm(dim=-1)
    spread_S = naive_SN.amax(-1) / naive_SN.amin(-1)
    return MixtureTrials(
        drift,
        unequal=float((spread_S > 1.0 + EQUAL).double().mean()),
        spread=float(spread_S.mean()),
        gap=float(((naive_SV - whole_SV).norm(dim=-1) / smoothing_S).mean()),
        error=float((corrected_SN / gamma_S1 - 1.0).abs().max()),
    )


def mixture(
    logp_SV: Tensor, old_logp_SV: Tensor, token_S: Tensor, top_SN: Tensor, alpha: float, corrected: bool
) -> Tensor:
    """Return equation 15 (naive) or equation 4 (corrected), [S], differentiable in `logp_SV`."""
    log_ratio_SV = logp_SV - old_logp_SV
    gamma_S = log_ratio_SV.gather(-1, token_S[:, None])[:, 0].exp()
    gamma_SN = log_ratio_SV.gather(-1, top_SN).exp()
    if corrected:
        gamma_SN = (gamma_S[:, None] / gamma_SN).detach() * gamma_SN
    return (1.0 - alpha) * gamma_S + alpha * gamma_SN.mean(-1)


def coefficients(logit_SV: Tensor, old_logp_SV: Tensor, token_S: Tensor, top_SN: Tensor, corrected: bool) -> Tensor:
    """Return by autograd the candidates' importance coefficients, [S, N], at alpha = 1: no other term is there."""
    logp_SV = logit_SV.log_softmax(-1).detach().requires_grad_()
    value_S = mixture(logp_SV, old_logp_SV, token_S, top_SN, 1.0, corrected)
    (gradient_SV,) = torch.autograd.grad(value_S.sum(), logp_SV)
    return TOPN * gradient_SV.gather(-1, top_SN)


def logit_gradient(
    logit_SV: Tensor, old_logp_SV: Tensor, token_S: Tensor, top_SN: Tensor, alpha: float, corrected: bool
) -> Tensor:
    """Return by autograd the gradient of the mixture with respect to the logits, [S, V]."""
    logit_SV = logit_SV.detach().requires_grad_()
    value_S = mixture(logit_SV.log_softmax(-1), old_logp_SV, token_S, top_SN, alpha, corrected)
    (gradient_SV,) = torch.autograd.grad(value_S.sum(), logit_SV)
    return gradient_SV
