"""Only relative negatives train: the "-N" of GRPO-N and GSPO-N (arXiv 2510.04028, section 4.1 and appendix B.5).

    J_N = 1/G sum_i 1/|y_i| sum_t 1[A_it < 0] (the usual term of token t)

Tokens whose advantage is not negative get advantage 0; they still count in every denominator, 1/G and 1/|y_i| alike, as
printed. The sign is that of the advantage when this method's turn comes: name it after others that shift advantages.
Degenerate cases: groups that are all correct or all wrong have zero advantages before and after; a step without a
negative advantage has no policy gradient, penalties remain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megasharp.algos.base import Method, MethodParams, TokenMetric, TokenMetrics
from megasharp.algos.psr import PSR
from megasharp.common.records import TokenInputs


class NegativeOnly(Method[MethodParams]):
    """Advantages that are not negative become zero."""

    paper = "2510.04028"
    options = "advantages above 0 become 0."

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        """Refuse `psr`, which has no negative advantage."""
        return "it has no negative advantage, so nothing would train" if isinstance(other, PSR) else None

    def calibrate(self, adv_T: Tensor, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Return A_t where it is negative, else 0, float64 [T] (2510.04028, B.5); the metric is the share kept."""
        negative_T = adv_T < 0
        metrics = {"method/negative_only/kept": TokenMetric(negative_T.to(x.mask_T.dtype), x.mask_T)}
        return torch.where(negative_T, adv_T, torch.zeros_like(adv_T)), metrics
