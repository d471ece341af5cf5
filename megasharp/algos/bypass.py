"""The ratio is taken to the sampler itself: rho = pi / pi_sampler (verl's "bypass mode"; PPO, arXiv 1707.06347).

Where the sampler is not the policy (DLC, stale rollouts, another engine's numerics), GRPO's rho = pi / pi_old treats
its samples as the old policy's. Here the surrogate's ratio, and so its clip, is around what the sampler recorded.
Correct in expectation where nothing is clipped, for any surrogate that uses the ratio; for DLC that makes the update
on-policy again and undoes DLC's effect (research notes on 2601.15609), which is why nothing does it by default.

log rho = (log pi - log pi_old) + (log pi_old - log pi_sampler): added, so that what other methods did to the first term
stays; the old log-probs cancel. Where several mini-batches ask for them, their pass still runs. `policy/ratio` and
`policy/kl_old` are then against the sampler. Truncation (top-p, top-k) is part of the sampler's distribution.
Degenerate case: a sampler that is the old policy leaves the ratio as it is. From public code, not from a paper.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Needs
from megasharp.algos.truncated_is import TruncatedIS
from megasharp.common.records import TokenInputs


class Bypass(Method[MethodParams]):
    """The importance ratio to the sampler."""

    paper = "1707.06347"
    status = "from public code: verl's bypass mode"
    options = "the importance ratio is taken to the sampler's log-probs."

    def needs(self) -> Needs:
        """Ask for the sampler's log-probs, which every rollout records."""
        return Needs(sampler_logp=True)

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        """Refuse `truncated_is`, which corrects the same difference."""
        return "the difference to the sampler would be corrected twice" if isinstance(other, TruncatedIS) else None

    def log_ratio(self, logr_T: Tensor, x: TokenInputs, adv_T: Tensor) -> Tensor:
        """Return [T], nats: log pi - log pi_sampler, as the old log-probs are added and cancel (verl's bypass mode)."""
        assert x.sampler_logp_T is not None
        return logr_T + (x.before_T - x.sampler_logp_T)
