"""One rank, in this process: no copies, and a debugger can step through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from megasharp.mcore.learner import LearnerSettings, RankLearner


class OneRank:
    """Satisfies `Ranks`. Owns this process's default process group."""

    def __init__(self, settings: LearnerSettings, device: torch.device) -> None:
        assert settings.layout.world == 1
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            self._learner = RankLearner(settings, device)
        except BaseException:
            dist.destroy_process_group()
            raise

    def call(self, method: str, *args: object) -> list[Any]:
        """The one rank's result."""
        return [getattr(self._learner, method)(*args)]

    def stream(self, method: str) -> Iterator[tuple[str, Tensor]]:
        """The one rank's items."""
        yield from getattr(self._learner, method)()

    def close(self) -> None:
        """Give the process group back."""
        self._learner.close()
        dist.destroy_process_group()
