"""Next-token cross-entropy on sampled responses: the loss of DLC's memory network (arXiv 2601.15609, section 4.2).

    loss = - mean over response tokens of log pi_memory(y_t | x, y_<t)

Not a method of the table: it is no way to train a policy on rewards.
"""

from __future__ import annotations

from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Reduction, Stats, TokenMetric, TokenMetrics
from megasharp.algos.recipe import Recipe
from megasharp.types import TokenInputs


class CrossEntropy(Method[MethodParams]):
    """Minus the log-prob of each sampled token."""

    paper = "2601.15609"

    def surrogate(self, x: TokenInputs, logr_T: Tensor, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        assert x.logp_T is not None
        return -x.logp_T, {"memory/cross_entropy": TokenMetric(-x.logp_T.detach(), x.mask_T)}


def cross_entropy_recipe() -> Recipe:
    """The recipe of one supervised step; its advantages are never asked for."""
    return Recipe({"cross_entropy": CrossEntropy(MethodParams())}, Reduction.TOKEN_MEAN, constant=1.0, mini_batches=1)
