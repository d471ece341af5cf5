"""One rank, in this process: no copies, and a debugger can step through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from megasharp.mcore.learner import LearnerSettings
from megasharp.mcore.parallel import meet
from megasharp.mcore.rank import POLICY, Rank


class OneRank:
    """Satisfies `Ranks`. Owns this process's default process group."""

    def __init__(self, settings: Mapping[str, LearnerSettings], device: torch.device) -> None:
        assert settings[POLICY].layout.world == 1
        meet(HashStore(), 0, 1, device)
        try:
            self._rank = Rank(settings, device)
        except BaseException:
            dist.destroy_process_group()
            raise

    def call(self, learner: str, method: str, *args: object) -> list[Any]:
        """The one rank's result."""
        return [getattr(self._rank.learners[learner], method)(*args)]

    def apply(self, learner: str, function: Callable[..., Any], *args: object) -> list[Any]:
        """The one rank's result."""
        return [function(self._rank.learners[learner], *args)]

    def stream(self, learner: str, method: str) -> Iterator[tuple[str, Tensor]]:
        """The one rank's items."""
        yield from getattr(self._rank.learners[learner], method)()

    def close(self) -> None:
        """Give the process group back."""
        self._rank.close()
        dist.destroy_process_group()
