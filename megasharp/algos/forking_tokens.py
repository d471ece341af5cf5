"""Only the tokens of highest entropy train: the forks of a response (Beyond the 80/20 Rule, arXiv 2506.01939).

    tau = the ceil(share N)-th largest entropy of the N unmasked tokens          weight_t = N / N_selected 1[H_t >= tau]

Differs from GRPO, or from DAPO on which the paper builds: that weight. The factor N / N_selected makes the token mean
divide by the number of selected tokens, as the authors' code does by masking the loss; it is one constant for the whole
optimizer step. Under any other reduction a response's own divisor stays its full length and the same constant
multiplies: there selected tokens of a response with few forks weigh less than in a mean over its forks.

Printed: the top 20 % by entropy, pooled over the batch. Departure from public code: there the pool is a micro-batch and
the entropy the current policy's; here the pool is the optimizer step and the entropy that before it. Entropies are at
the rollout temperature. Degenerate cases: entropies equal to tau are all selected, so equal entropies select all
tokens, and the weights are 1; `share` = 1 is the plain method.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Needs, Reduction, Stats, TokenMetric, TokenMetrics
from megasharp.common.records import TokenInputs


class ForkingTokensParams(MethodParams):
    """`share` of the tokens that train."""

    share: float = Field(
        default=0.2,
        gt=0.0,
        le=1.0,
        description="Share of the optimizer step's tokens that train, those of the highest entropy. The paper uses "
        "0.2. 1: all tokens.",
    )


class ForkingTokens(Method[ForkingTokensParams]):
    """A mask on tokens of low entropy."""

    paper = "2506.01939"
    status = "as printed; statistics of the whole optimizer step"
    options = "only the tokens of highest entropy train."
    Params = ForkingTokensParams
    reduction = Reduction.TOKEN_MEAN

    def needs(self) -> Needs:
        """Ask for the entropy before the update."""
        return Needs(old_entropy=True)

    def prepare(self, adv_T: Tensor, x: TokenInputs) -> Stats:
        """Return scalars `threshold`, tau in nats, and `scale`, N / N_selected in float64 (2506.01939).

        Without unmasked tokens tau is infinite, so none is selected.
        """
        assert x.old_entropy_T is not None
        entropy = x.old_entropy_T[x.mask_T > 0]
        # 0.07 times 100 is a little above 7 in binary, and its ceiling would be 8.
        count = math.ceil(self.params.share * entropy.numel() - 1e-9)
        threshold = torch.topk(entropy, count).values[-1] if count else x.old_entropy_T.new_tensor(torch.inf)
        selected = (entropy >= threshold).sum().clamp(min=1)
        return {"threshold": threshold, "scale": entropy.numel() / selected.double()}

    def weight(self, x: TokenInputs, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """Return `scale` where the entropy before the update is at least tau, else 0; [T].

        The metric is the share of unmasked tokens that is selected.
        """
        assert x.old_entropy_T is not None
        selected_T = (x.old_entropy_T >= stats["threshold"]).to(x.mask_T.dtype)
        metrics = {"method/forking_tokens/selected": TokenMetric(selected_T, x.mask_T)}
        return selected_T * stats["scale"].to(x.mask_T.dtype), metrics
