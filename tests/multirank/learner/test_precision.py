"""bfloat16 weights train with everything that adds up in float32, and train as float32 weights do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from launch import run_ranks
from policies import LAYOUTS, learner_on, packed, ragged_sequences, recipe, save_model, settings

from megasharp.algos.base import Needs, OldLogp
from megasharp.learner.learner import LearnerSettings, RankLearner
from megasharp.learner.optimizer import parts

NEEDS = Needs(old_logp=OldLogp.BEFORE_STEP)


@dataclass
class Trained:
    """Losses of steps on one batch, and the dtypes of weights, gradients, main weights and moments."""

    losses: list[float]
    weights: set[torch.dtype]
    gradients: set[torch.dtype]
    mains: set[torch.dtype]
    moments: set[torch.dtype]


def train(values: LearnerSettings) -> Trained:
    with learner_on(values) as (learner, own):
        # Ratios to the start's log-probs, so that the loss falls as the policy moves.
        batch = learner.annotate(packed(ragged_sequences(), values.layout), NEEDS)
        losses = [float(learner.step(batch, recipe()).loss) for _ in range(4)]
        return Trained(losses, *dtypes(own))


def dtypes(own: RankLearner) -> tuple[set[torch.dtype], set[torch.dtype], set[torch.dtype], set[torch.dtype]]:
    inner = [part.optimizer for part in parts(own._optimizer)]
    return (
        {parameter.dtype for chunk in own._chunks for parameter in chunk.parameters()},
        {buffer.grad_data.dtype for chunk in own._ddp for buffer in chunk.buffers},
        {p.dtype for o in inner for group in o.param_groups for p in group["params"]},
        {x.dtype for o in inner for state in o.state.values() for x in state.values() if torch.is_tensor(x)},
    )


def on_rank(rank: int, world: int, folder: str) -> tuple[Trained, Trained]:
    values = settings(folder, LAYOUTS["dp2"], NEEDS, diagnostics=None)
    return train(values), train(replace(values, dtype=torch.bfloat16))


def test_bfloat16_weights_have_float32_main_weights_gradients_and_moments(tmp_path: Path) -> None:
    for exact, rounded in run_ranks(2, on_rank, save_model(tmp_path, "qwen2-tied")):
        assert exact.weights == {torch.float32} and rounded.weights == {torch.bfloat16}
        assert rounded.gradients == rounded.mains == rounded.moments == {torch.float32}
        assert exact.losses[-1] < exact.losses[0] and rounded.losses[-1] < rounded.losses[0]
        fall = exact.losses[0] - exact.losses[-1]
        assert abs(rounded.losses[-1] - exact.losses[-1]) < 0.2 * fall
