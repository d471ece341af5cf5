"""One rank of a run: its part of every learner. The policy and DLC's memory network share its process groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megasharp.common.random_state import compute_deterministically
from megasharp.learner.learner import LearnerSettings, RankLearner
from megasharp.learner.parallel import destroy, initialize, megatron_device

POLICY = "policy"
MEMORY = "memory"


class Rank:
    """Builds this rank's learners by name, all in the policy's layout; torch.distributed must be initialised."""

    def __init__(self, settings: Mapping[str, LearnerSettings], device: torch.device) -> None:
        policy = settings[POLICY]
        assert all(other.layout == policy.layout for other in settings.values()), "learners of a run share one layout"
        self._device = device
        if policy.deterministic:
            compute_deterministically()
        with megatron_device(device):
            place = initialize(policy.layout, policy.seed)
        self.learners = {name: RankLearner(own, place, device) for name, own in settings.items()}

    def close(self) -> None:
        """Forget the parallel groups."""
        with megatron_device(self._device):
            destroy()
