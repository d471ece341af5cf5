"""CaSP: candidate-aware support preservation (arXiv 2510.14807 v3, equations 4 and 5; SimKO in v1).

Let w_t = 1 where the policy's entropy is above the q-quantile of its response's tokens, else 0. Where A > 0, with v^(n)
the policy's N most probable candidates and gamma^(n) = pi(v^(n)) / pi_old(v^(n)), the ratio gamma becomes

    gamma+ = (1 - alpha w) gamma + alpha w sum_n omega_n sg[gamma / gamma^(n)] gamma^(n),     omega_n = 1/N

where sg passes no gradient. Its value is gamma, and its gradient on the logits is
gamma ((1 - alpha w) e_y + alpha w sum_n omega_n e_v(n) - pi). pi_old(v^(n)) cancels, so it is written
here as a log-prob of the same value (derived, exact):

    l~ = (1 - alpha w) log pi(y) + alpha w sum_n omega_n log pi(v^(n))

Where A < 0, the sampled token is the most probable one and w = 1: gamma- = lambda_top1 gamma, before the clip.

Printed: both equations, alpha 0.01 (logic 0.005, code 0.05), N = 3, q = 0.8, lambda_top1 = 1.1 (logic 1.05), candidates
and entropy of the current policy. `penalty_on: ratio` is v3: the clip then stops at gamma < (1 - low) / lambda_top1.
`advantage` is the code of v1: the advantage is multiplied, and the clip still stops at gamma < 1 - low. "Correct" is
A > 0, as in the paper's pseudo-code; the code of v1 asks for the verifier's score. `omega: softmax` (derived, ours)
weighs the candidates by sg[pi(v^(n)) / sum_m pi(v^(m))].

Degenerate cases: the comparison is strict, so of equal entropies none passes the threshold they set, and a response of
one token is not gated; q = 0 selects every unmasked token and q = 1 none, by definition. A response is never split, so
the gate does not depend on packing. alpha = 0 with lambda_top1 = 1, or q = 1, is the recipe without this method.
`policy/ratio`, `policy/kl_old` and the clip's shares include lambda_top1, so that at pi = pi_old the first two are not
exactly 1 and 0.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import DEFAULT_QUANTILE, Method, MethodParams, Needs, Stats, TokenMetric, TokenMetrics, gated
from megasharp.common.records import TokenInputs


class CaSPParams(MethodParams):
    """`alpha` of the gradient goes to the `topn` candidates at tokens above the `quantile` of entropy."""

    alpha: float = Field(
        default=0.01,
        ge=0.0,
        le=1.0,
        description="Share of a positive token's gradient that goes to the top candidates. The paper uses 0.01 "
        "(mathematics), 0.005 (logic) and 0.05 (code). 0: none.",
    )
    topn: int = Field(
        default=3,
        ge=1,
        description="Number of most probable candidates that share the gradient. The paper uses 3.",
    )
    quantile: float = Field(
        default=DEFAULT_QUANTILE,
        ge=0.0,
        le=1.0,
        description="Quantile of a response's token entropies above which tokens are treated. The paper uses 0.8, so "
        "the top fifth. 0: all tokens; 1: none.",
    )
    omega: Literal["uniform", "softmax"] = Field(
        default="uniform",
        description="Weights of the candidates: uniform as in the paper, or softmax in proportion to their "
        "probability (ours).",
    )
    lambda_top1: float = Field(
        default=1.1,
        ge=1.0,
        description="Factor on the penalty of a wrong token that is the policy's most probable one. The paper uses "
        "1.1, for logic 1.05. 1: no extra penalty.",
    )
    penalty_on: Literal["ratio", "advantage"] = Field(
        default="ratio",
        description="Place of lambda_top1: ratio as in the paper's third version, where it also moves the clip; "
        "advantage as in the code of the first version. gspo needs advantage.",
    )


class CaSP(Method[CaSPParams]):
    """Positive gradients shared among the top candidates, a stronger penalty on a wrong favourite."""

    paper = "2510.14807"
    status = "as printed in v3; old candidates cancelled exactly; softmax weights ours"
    options = "positive gradients shared among the most likely candidates, and a stronger penalty on a wrong favourite."
    Params = CaSPParams

    def needs(self) -> Needs:
        """Ask for the entropy, for `topn` candidates, and for the gate at `quantile`."""
        return Needs(entropy=True, topn=self.params.topn, gate=self.params.quantile)

    def direction(self, logp_T: Tensor, x: TokenInputs, adv_T: Tensor) -> tuple[Tensor, TokenMetrics]:
        """Return log pi [T], its gradient shared with the top N at gated tokens of A > 0 (2510.14807, equation 4).

        The metrics are the shares of unmasked tokens that are gated, and that are penalised.
        """
        assert x.topn_logp_TN is not None
        gate_T = self._gate(x)
        share_T = self.params.alpha * gate_T * (adv_T > 0)
        # The batch may hold more candidates than this method asked for.
        candidate_logp_TN = x.topn_logp_TN[:, : self.params.topn]
        if self.params.omega == "softmax":
            omega_TN = candidate_logp_TN.detach().softmax(1)
        else:
            omega_TN = torch.full_like(candidate_logp_TN, 1.0 / candidate_logp_TN.shape[1])
        # The value stays log pi exactly, so ratio and clip do not move: only the gradient is shared out.
        smoothed_T = (1.0 - share_T) * logp_T + share_T * (omega_TN * candidate_logp_TN).sum(1)
        metrics = {
            "method/casp/gate_rate": TokenMetric(gate_T, x.mask_T),
            "method/casp/penalised": TokenMetric(self._penalised(x, adv_T), x.mask_T),
        }
        return logp_T.detach() + (smoothed_T - smoothed_T.detach()), metrics

    def log_ratio(self, logr_T: Tensor, x: TokenInputs, adv_T: Tensor) -> Tensor:
        """Add log lambda_top1 at gated top-1 tokens of A < 0 (2510.14807 v3, equation 5); [T], nats.

        Under `penalty_on: advantage` the ratio stays as it is.
        """
        if self.params.penalty_on != "ratio":
            return logr_T
        return logr_T + math.log(self.params.lambda_top1) * self._penalised(x, adv_T)

    def weight(self, x: TokenInputs, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """Return lambda_top1 [T] at gated top-1 tokens of A < 0, else 1: the code of v1 of 2510.14807.

        Under `penalty_on: ratio` it is 1 everywhere.
        """
        if self.params.penalty_on != "advantage":
            return torch.ones_like(adv_T), {}
        return 1.0 + (self.params.lambda_top1 - 1.0) * self._penalised(x, adv_T), {}

    def _gate(self, x: TokenInputs) -> Tensor:
        return gated(x, self.params.quantile).to(x.mask_T.dtype)

    def _penalised(self, x: TokenInputs, adv_T: Tensor) -> Tensor:
        """1 at gated tokens of negative advantage that are the policy's most probable ones, else 0."""
        assert x.is_top1_T is not None
        return self._gate(x) * (adv_T < 0) * x.is_top1_T
