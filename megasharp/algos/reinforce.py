"""REINFORCE: the plain policy gradient, without ratio or clip (Williams, 1992; for language models 2402.14740).

    loss = -A log pi          gradient: -A grad log pi

The form with log pi instead of pi / pi_old is ours to choose: on the first optimizer step after a rollout both have the
same gradient, and this one's value is a weighted negative log-likelihood. It is unbiased on that first step only; with
several mini-batches the later ones are off-policy and nothing corrects them: `policy/ratio` says how far they are.
Degenerate case: zero advantages give no loss. Methods that change the ratio are refused: there is none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Needs, OldLogp, Stats, TokenMetrics
from megasharp.algos.bypass import Bypass
from megasharp.algos.casp import CaSP
from megasharp.algos.group_statistics import bounded, logp_along, ratio_metrics
from megasharp.common.records import TokenInputs


class Reinforce(Method[MethodParams]):
    """The score-function estimator, in place of the clipped surrogate."""

    paper = "2402.14740"
    options = "the policy gradient without ratio or clip."

    def needs(self) -> Needs:
        """Ask for the old log-probs inside the loss, for the metrics of the ratio alone."""
        return Needs(old_logp=OldLogp.IN_LOSS)

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        """Refuse methods that change the ratio: `casp` with its penalty there, and `bypass`."""
        if isinstance(other, CaSP) and other.params.penalty_on == "ratio":
            return f"there is no ratio that lambda_top1 could multiply; set recipe.{name}.penalty_on to advantage"
        return "there is no ratio to take to the sampler" if isinstance(other, Bypass) else None

    def surrogate(self, x: TokenInputs, logr_T: Tensor, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """Return -A log pi, [T] (2402.14740), with the metrics of a ratio that the loss does not use."""
        return -adv_T * logp_along(x, logr_T), ratio_metrics(x, bounded(logr_T))
