"""The memory network of DLC: after every step it learns, by cross-entropy, what the policy has just said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from megasharp.algos.cross_entropy import cross_entropy_recipe
from megasharp.algos.recipe import training_sequence
from megasharp.batching.pack import PackLayout, pack
from megasharp.ranks.learner import RanksLearner
from megasharp.types import Group, Mean, Metrics


class MemoryNetwork:
    """A learner of the policy's kind with one cross-entropy step per training step.

    It learns from every sampled response, right or wrong, in groups that selection dropped too: it follows what is
    sampled, not what is trained on (2601.15609 section 4.2; all responses, and response tokens only, are derived).
    """

    def __init__(self, learner: RanksLearner, layout: PackLayout) -> None:
        self._learner = learner
        self._layout = dataclasses.replace(layout, mini_batches=1)
        self._recipe = cross_entropy_recipe()

    @property
    def learner(self) -> RanksLearner:
        """Who is saved and loaded: the network's weights and optimizer."""
        return self._learner

    def observe(self, groups: Sequence[Group], seed: int) -> Metrics:
        """One optimizer step on all responses of `groups`; figures under `memory/`."""
        sequences = [training_sequence(group, i, 0.0) for group in groups for i in range(len(group.responses))]
        stats = self._learner.step(pack(sequences, self._layout, seed), self._recipe)
        return {
            **stats.metrics,
            "memory/grad_norm": Mean(stats.grad_norm, 1.0),
            "memory/learning_rate": Mean(stats.learning_rate, 1.0),
            "memory/skipped": Mean(float(stats.skipped), 1.0),
        }

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole Hugging Face tensors, each once."""
        return self._learner.export_weights()

    def apply(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """Call a module's `function(learner, *args)` on every rank, with its part of the memory; in rank order."""
        return self._learner.apply(function, *args)

    def offload(self) -> None:
        """Free what `policy.offload` names on every rank."""
        self._learner.offload()

    def onload(self) -> None:
        """Undo `offload`."""
        self._learner.onload()
