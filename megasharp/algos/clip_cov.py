"""Clip-Cov: a few tokens of high covariance do not train (The Entropy Mechanism of RL, arXiv 2505.22617).

    cov_t = (A_t - mean A) (log pi_old(y_t) - mean log pi_old)
    among tokens with low < cov_t < high, max(floor(share N), 1) picked at random have loss 0

Tokens that are both likely and rewarded, or unlikely and punished, drive entropy down; leaving some out slows that.
Differs from GRPO: those weights, and a clip with bounds 1 and 1 as in the authors' scripts, effectively off. Left-out
tokens stay in the denominators. Printed: the covariance, the bounds 1 and 5, the share 2e-4.

Departures from public code, so that the result does not depend on packing: there means, N and the choice are of one
micro-batch, log-probs are the current ones, and tokens beyond the clip are not candidates; here all are of the whole
optimizer step, from log-probs before it, and candidates are all tokens within the bounds. Which ones are picked is
fixed by each response's seed and the token's position. Degenerate cases: without candidates nothing is left out; with
fewer than the number due, all are.
"""

from __future__ import annotations

from pydantic import Field, model_validator
from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Needs, OldLogp, Stats, TokenMetric, TokenMetrics
from megasharp.algos.clip import ClipParams
from megasharp.algos.covariance import covariance, covariance_means, draw_threshold, share_of
from megasharp.common.records import TokenInputs


class ClipCovParams(MethodParams):
    """`share` of all tokens that is left out, from those with a covariance strictly between `low` and `high`."""

    share: float = Field(
        default=2e-4,
        gt=0.0,
        le=1.0,
        description="Share of the optimizer step's tokens whose loss is left out, rounded down but at least one "
        "token. The paper uses 0.0002.",
    )
    low: float = Field(
        default=1.0,
        description="Covariance of advantage and log-prob above which a token may be picked. The paper uses 1.",
    )
    high: float = Field(
        default=5.0,
        description="Covariance of advantage and log-prob below which a token may be picked. The paper uses 5.",
    )

    @model_validator(mode="after")
    def _some_between(self) -> ClipCovParams:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class ClipCov(Method[ClipCovParams]):
    """Randomly chosen tokens of high covariance have no loss."""

    paper = "2505.22617"
    status = "as printed; statistics of the whole optimizer step"
    options = "a few tokens of high covariance do not train."
    Params = ClipCovParams
    brings = {"clip": ClipParams(low=1.0, high=1.0)}

    def needs(self) -> Needs:
        """Ask for the old log-probs before the step, of which the covariance is made, and for a draw per token."""
        return Needs(old_logp=OldLogp.BEFORE_STEP, draw=True)

    def prepare(self, adv_T: Tensor, x: TokenInputs) -> Stats:
        """Return the step's means of advantage and log-prob (nats), and the draw up to which tokens are left out.

        Float64 scalars `mean_advantage`, `mean_logp` and `draw`; the draw is -1 without candidates (2505.22617).
        """
        means = covariance_means(adv_T, x)
        candidate_T = self._candidates(adv_T, x, means)
        return {**means, "draw": draw_threshold(x, candidate_T, share_of(x, self.params.share))}

    def weight(self, x: TokenInputs, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """Return 0 at candidates whose draw is not above `stats["draw"]`, else 1; [T], with their share as metric."""
        assert x.draw_T is not None
        clipped_T = self._candidates(adv_T, x, stats) & (x.draw_T <= stats["draw"])
        share_T = clipped_T.to(x.mask_T.dtype)
        return 1.0 - share_T, {"policy/clip_cov": TokenMetric(share_T, x.mask_T)}

    def _candidates(self, adv_T: Tensor, x: TokenInputs, means: Stats) -> Tensor:
        cov_T = covariance(adv_T, x, means)
        return (x.mask_T > 0) & (cov_T > self.params.low) & (cov_T < self.params.high)
