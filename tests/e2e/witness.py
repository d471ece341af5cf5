"""A run that writes down what it holds before and after every update: what the update began with, drew and left.

`python witnessed.py PATH train ...` is `megasharp train ...` with it: one line of JSON per update of any learner. It
draws from every generator of every rank too, which no method does so far, so that generators that began anew are seen.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megasharp.algos.recipe import Recipe
from megasharp.common.records import StepBatch, StepStats
from megasharp.convert.record import tensor_sha256, weights_sha256
from megasharp.learner.learner import RankLearner
from megasharp.learner.optimizer import parts
from megasharp.learner.parallel import megatron_device
from megasharp.learner.ranks.all_ranks import RanksLearner


def held(own: RankLearner) -> tuple[list[int], int, int]:
    """A rank's Adam: its step counts, the elements of its moments, and how many of them are not zero."""
    optimizers = [part.optimizer for part in parts(own._optimizer)]
    counts = [int(group["step"]) for o in optimizers for group in o.param_groups if group["params"] and "step" in group]
    moments = [value for o in optimizers for state in o.state.values() for value in state.values()]
    return counts, sum(m.numel() for m in moments), sum(int(m.count_nonzero()) for m in moments)


def drawn(own: RankLearner) -> list[float]:
    """A number from each generator of a rank, Megatron's tracker among them."""
    with megatron_device(own.device), get_cuda_rng_tracker().fork():
        tracked = torch.rand(1).item()
    return [*drawn_here(), tracked]


def drawn_here() -> list[float]:
    """A number from each of a process's own generators."""
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


def weights(learner: RanksLearner) -> str:
    """The digest of all weights."""
    return weights_sha256({name: tensor_sha256(weight) for name, weight in learner.export_weights()})


def tokens(batch: StepBatch) -> str:
    """The digest of all packed rows, in order."""
    rows = [micro.tokens_P for mini in batch.mini_batches for rank in mini.per_rank for micro in rank]
    return hashlib.sha256(b"".join(row.numpy().tobytes() for row in rows)).hexdigest()


def install(path: Path) -> None:
    """Have every learner of this process write to `path`."""
    plain = RanksLearner.step

    def step(self: RanksLearner, batch: StepBatch, recipe: Recipe, norm_limit: float | None = None) -> StepStats:
        line: dict[str, Any] = {
            "learner": self._name,
            "moments": self.call(held),
            "drawn": [*self.call(drawn), drawn_here()],
            "tokens": tokens(batch),
            "before": weights(self),
        }
        stats = plain(self, batch, recipe, norm_limit)
        line["update"] = [stats.loss.hex(), stats.grad_norm.hex(), stats.learning_rate.hex()]
        line["weights"] = weights(self)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return stats

    RanksLearner.step = step  # type: ignore[method-assign]
