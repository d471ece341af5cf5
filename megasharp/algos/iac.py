"""IAC: inverse-success advantage calibration (arXiv 2601.15609, section 4.1, equations 4 and 5).

    A'(q, o) = w(q) A(q, o)  for positive trajectories          A'(q, o) = A(q, o)  for all others

With p the share of correct responses among the G of query q, `form` picks the weight, always with 0^0 = 1:

    normalized   w = (1 - p)^alpha          literal   w = (G - |S+|)^alpha
    budget       w = (1 - p)^alpha / mean of (1 - p)^alpha over the step's positive trajectories
    inverse      w = p^-alpha = (G / |S+|)^alpha

Printed: who is calibrated ("we only calibrate positive advantages and leave negative ones untouched"), alpha = 0 is the
estimator alone, alpha = 1. The formula is lost in the text: `literal` is from a third party's notes; `normalized`
(derived, the default) differs by the constant G^alpha and is the one that slows collapse in the paper's toy. The paper
says both that "larger values de-emphasize easy queries" and that "IAC redistributes the advantage budget from easy
queries to difficult ones" (4.1); or that alpha "controls how strongly we up-weight advantages from hard, low-success
queries and down-weight those from easy, high-success ones" (App. K). `normalized` only weighs down, `literal` only up;
`budget` (derived, ours) does both. `inverse` (derived) takes the method's name by its word, the inverse of the success
rate: it only weighs up, from 1 where all are correct to G^alpha where one is.

A positive trajectory is a correct response's, where its advantage is positive: a correct response that another rule
(soft overlong) gave a negative advantage is left untouched. The mean of `budget` counts each such response once, not by
its tokens. Degenerate cases: a group that is all correct has no advantage under most estimators, so it does not enter
that mean; under one where it has (psr, ds) its weight is 0^alpha (`inverse`: 1). A group that is all wrong has nothing
to calibrate; a step without positive trajectories is unchanged. Hooks run in the recipe's order: [iac, ds] leaves the
term of `ds` unweighted, [ds, iac] weighs it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams, TokenMetric, TokenMetrics
from megasharp.algos.negative_only import NegativeOnly
from megasharp.algos.nsr import NSR
from megasharp.common.records import TokenInputs
from megasharp.ops.segment import segment_broadcast, segment_sum

BINS = 5


class IACParams(MethodParams):
    """Exponent `alpha` (the paper tries 0, 0.5, 1, 1.5, 2) and form of the weight."""

    alpha: float = Field(
        default=1.0,
        ge=0.0,
        description="Exponent of the failure rate that weighs positive advantages; the paper tries 0, 0.5, 1, 1.5 and "
        "2. Raise it to train less on easy problems. 0: no change.",
    )
    form: Literal["normalized", "literal", "budget", "inverse"] = Field(
        default="normalized",
        description="Form of the weight, with p the group's success rate. normalized is (1 - p)^alpha; literal is the "
        "number of wrong responses to the power alpha; budget divides normalized by its mean over the step, so that "
        "easy problems lose and hard ones gain; inverse is p^-alpha, which weighs hard problems up and none down.",
    )


class IAC(Method[IACParams]):
    """Smaller positive advantages for queries that are already solved often."""

    paper = "2601.15609"
    status = "derived: the formula is lost in the text, forms as options"
    options = "smaller positive advantages for problems that are already solved often."
    Params = IACParams

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        """Refuse `nsr` and `negative_only`, which leave no positive advantage."""
        return "there is no positive advantage to calibrate" if isinstance(other, NSR | NegativeOnly) else None

    def calibrate(self, adv_T: Tensor, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Multiply positive advantages of correct responses by w(q), float64 [T] (2601.15609, equations 4 and 5).

        The metrics are over positive trajectories, each counted once: the mean w, and the shares by (1 - p)^alpha.
        """
        positive_T = (x.mask_T > 0) & (x.correct_T > 0) & (adv_T > 0)
        # 1 / (positive tokens of the response), so that every positive trajectory sums to 1.
        count_T = segment_broadcast(segment_sum(positive_T.double(), x.seq_T, x.num_sequences), x.seq_T)
        share_T = (positive_T / count_T.clamp(min=1.0)).to(adv_T.dtype)
        size_T = x.group_size_T.to(adv_T.dtype).clamp(min=1.0)
        wrong_T = size_T - x.group_correct_T.to(adv_T.dtype)
        normalized_T = (wrong_T / size_T) ** self.params.alpha
        weight_T = self._weight(normalized_T, wrong_T, size_T, share_T)
        metrics = {"method/iac/weight": TokenMetric(weight_T, share_T)}
        # Shares of the positive trajectories by (1 - p)^alpha, whatever the form; the last bin includes 1.
        bin_T = (normalized_T * BINS).floor().clamp(max=BINS - 1)
        for i in range(BINS):
            name = f"method/iac/weight_{i / BINS}_{(i + 1) / BINS}"
            metrics[name] = TokenMetric((bin_T == i).to(share_T.dtype), share_T)
        return torch.where(positive_T, weight_T * adv_T, adv_T), metrics

    def _weight(self, normalized_T: Tensor, wrong_T: Tensor, size_T: Tensor, share_T: Tensor) -> Tensor:
        if self.params.form == "normalized":
            return normalized_T
        if self.params.form == "literal":
            return wrong_T**self.params.alpha
        if self.params.form == "inverse":
            # A group that is all wrong has nothing to weigh.
            return (size_T / (size_T - wrong_T).clamp(min=1.0)) ** self.params.alpha
        total = (normalized_T * share_T).sum()
        # Without a positive weight anywhere there is nothing to divide by, and all weights that count are 0.
        return normalized_T * torch.where(total > 0, share_T.sum() / total, 1.0)
