"""Learners over the quickstart's networks, and what tests do to their ranks; the ranks import this file too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megasharp.algos.base import Needs
from megasharp.common.group_environment import as_set
from megasharp.common.layout import ParallelLayout
from megasharp.config.policy import OffloadedPart, PolicyConfig
from megasharp.learner.learner import MEMORY, POLICY, LearnerSettings, RankLearner
from megasharp.learner.ranks.all_ranks import OneRank

REPOSITORY = Path(__file__).parents[2]
FOLDERS = {
    POLICY: REPOSITORY / "examples" / "quickstart" / "base",
    MEMORY: REPOSITORY / "examples" / "quickstart" / "memory",
}
CPU = torch.device("cpu")


def learner_settings(
    layout: ParallelLayout, offload: Sequence[OffloadedPart] = (), folders: Mapping[str, Path] = FOLDERS
) -> dict[str, LearnerSettings]:
    """The networks in float32; they are pushed here, not trained."""
    return {
        name: LearnerSettings(
            folder=str(folder),
            policy=PolicyConfig(offload=list(offload)),
            dtype=torch.float32,
            layout=layout,
            total_steps=1,
            needs=Needs(),
            temperature=1.0,
            seed=0,
        )
        for name, folder in folders.items()
    }


def variables_here(part: RankLearner) -> dict[str, str | None]:
    """The rank's own variables that NCCL's groups with engines depend on."""
    return as_set(os.environ)


@torch.no_grad()
def scale(part: RankLearner, factor: float) -> None:
    """Other weights of the same shapes."""
    for chunk in part._chunks:
        for parameter in chunk.parameters():
            parameter.mul_(factor)


def interrupt(ranks: OneRank, learner: str, at: int, deed: Callable[[], None]) -> None:
    """The learner's next push does `deed`: before tensor number `at` of its export, or before its weights are lent."""
    part = ranks._rank.learners[learner]
    look, export = part.weights_state, RankLearner.export_weights

    def once() -> None:
        part.weights_state, RankLearner.export_weights = look, export  # type: ignore[method-assign]
        deed()

    def looked() -> tuple[int, ...]:
        once()
        return look()

    _interrupt(part, at, once)
    part.weights_state = looked  # type: ignore[method-assign]


def die_at(part: RankLearner, rank: int, at: int) -> None:
    """One rank is to be killed in its next export, before tensor number `at` or at the end; for `Ranks.call`."""
    if dist.get_rank() == rank:
        _interrupt(part, at, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _interrupt(part: RankLearner, at: int, deed: Callable[[], None]) -> None:
    """Replaces the method of the class, because ranks call that, for `part` alone and once."""
    export = RankLearner.export_weights

    def interrupted(self: RankLearner, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        if self is not part:
            yield from export(self, everywhere)
            return
        RankLearner.export_weights = export  # type: ignore[method-assign]
        number = -1
        for number, item in enumerate(export(self, everywhere)):
            if number == at:
                deed()
            yield item
        if number < at:
            deed()

    RankLearner.export_weights = interrupted  # type: ignore[method-assign]
