"""GSPO: one importance ratio per response, from its likelihood (Group Sequence Policy Optimization, 2507.18071).

    s_i = (pi(y_i) / pi_old(y_i)) ^ (1 / |y_i|) = exp( mean_t (log pi(y_it) - log pi_old(y_it)) )
    loss_i = max(-A_i s_i, -A_i clip(s_i, 1 - low, 1 + high))

Differs from GRPO in the ratio only: all tokens of a response share it, so a response is clipped as a whole. The bounds
are the paper's, 3e-4 and 4e-4: a mean of log-ratios moves far less than a single one. `level: token` is the paper's
token variant, s_it = sg[s_i] pi_it / sg[pi_it], where sg passes no gradient: the same value, each token with its own
gradient. With one advantage for all tokens of a response, loss and gradient equal those of `sequence`; they differ
where advantages differ by token.

Printed: both ratios, the bounds, 1/G sum_i 1/|y_i| sum_t (hence the reduction). |y_i| counts unmasked tokens. Public
code bounds the log-ratio at 10, here it is 20 as everywhere. Degenerate cases: a response of one token has its token
ratio; one without tokens has no loss; at pi = pi_old all ratios are 1.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Reduction
from megasharp.algos.bypass import Bypass
from megasharp.algos.casp import CaSP
from megasharp.algos.clip import ClipParams
from megasharp.algos.clip_cov import ClipCov
from megasharp.algos.forking_tokens import ForkingTokens
from megasharp.algos.ratio_mask import RatioMask
from megasharp.algos.truncated_is import TruncatedIS
from megasharp.common.records import TokenInputs
from megasharp.ops.segment import segment_broadcast, segment_mean


class GSPOParams(MethodParams):
    """`level`: gradient through the mean of a response's log-ratios, or token by token."""

    level: Literal["sequence", "token"] = Field(
        default="sequence",
        description="Path of the gradient: sequence through the mean ratio of the response; token through each "
        "token's own ratio, which differs only where advantages differ by token.",
    )


class GSPO(Method[GSPOParams]):
    """The ratio of whole responses, under the clipped surrogate."""

    paper = "2507.18071"
    options = "one importance ratio per response. Its clip bounds are in recipe.clip."
    Params = GSPOParams
    reduction = Reduction.SEQ_MEAN_TOKEN_MEAN
    brings = {"clip": ClipParams(low=3e-4, high=4e-4)}

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        """Refuse factors on single tokens (`truncated_is`, `ratio_mask`, `casp` on the ratio), masks, and `bypass`."""
        if isinstance(other, TruncatedIS | RatioMask) and other.params.level == "token":
            return f"the ratio is of whole responses, the weight of single tokens; set recipe.{name}.level to sequence"
        if isinstance(other, CaSP) and other.params.penalty_on == "ratio":
            return (
                f"a response has one ratio, lambda_top1 is on single tokens; set recipe.{name}.penalty_on to advantage"
            )
        if isinstance(other, ForkingTokens | ClipCov):
            return "a response has one ratio and one clip, the mask is on single tokens"
        if isinstance(other, Bypass):
            return "a response has one ratio, the difference to the sampler is of single tokens"
        return None

    def log_ratio(self, logr_T: Tensor, x: TokenInputs, adv_T: Tensor) -> Tensor:
        """Return log s_i, [T], the mean log-ratio (nats) over the unmasked tokens of each response (2507.18071).

        Under `level: token` the value is the same, and the gradient each token's own.
        """
        mean_S = segment_mean(logr_T, x.seq_T, x.num_sequences, x.mask_T)
        mean_T = segment_broadcast(mean_S, x.seq_T)
        if self.params.level == "sequence":
            return mean_T
        # The response's ratio as value, and each token's own gradient.
        return mean_T.detach() + (logr_T - logr_T.detach())
