"""The ratio is taken to what was recorded: rho = pi / pi_recorded (verl's "bypass mode"; PPO, arXiv 1707.06347).

Where the sampler is not the policy (DLC, stale rollouts, another engine's numerics), GRPO's rho = pi / pi_old treats
its samples as the old policy's. Here the surrogate's ratio, and so its clip, is around what the rollout recorded:

    against: policy     the policy in the version that sampled each token: PPO's old policy, whatever its age. Corrects
                        staleness and the engine's numerics, leaves the shift of dlc, top-p and top-k.
    against: sampler    the distribution that tokens were drawn from. Undoes that shift too, and with it DLC's effect
                        (research notes on 2601.15609).

The expected gradient is corrected token by token where nothing is clipped, for any surrogate that uses the ratio.

log rho = (log pi - log pi_old) + (log pi_old - log pi_recorded): added, so that what other methods did to the first
term stays; the old log-probs cancel. Where several mini-batches ask for them, their pass still runs. `policy/ratio` and
`policy/kl_old` are then against what was recorded. Degenerate case: a record equal to the old policy leaves the ratio
as it is. From public code, not from a paper.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megasharp.algos.base import Method
from megasharp.algos.group_statistics import Compared, ComparedParams
from megasharp.algos.truncated_is import TruncatedIS
from megasharp.common.records import TokenInputs


class Bypass(Compared[ComparedParams]):
    """The importance ratio to what was recorded of policy or sampler."""

    paper = "1707.06347"
    status = "from public code: verl's bypass mode"
    options = "the importance ratio is taken to recorded log-probs."
    Params = ComparedParams
    corrects = True

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        """Refuse `truncated_is`, which corrects the same difference, whatever each is against."""
        return "the difference to the sampler would be corrected twice" if isinstance(other, TruncatedIS) else None

    def log_ratio(self, logr_T: Tensor, x: TokenInputs, adv_T: Tensor) -> Tensor:
        """Return [T], nats: log pi - log pi_recorded, as the old log-probs are added and cancel (verl's bypass)."""
        return logr_T + (x.before_T - self.recorded(x))
