"""A rank's random number generators come back from a checkpoint, Megatron's tracker among them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from launch import run_ranks
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from policies import CPU, LAYOUTS, learner_on, recipe, save_model, settings

from megasharp.common.random_state import GeneratorStates
from megasharp.learner.learner import RankLearner
from megasharp.learner.parallel import megatron_device
from megasharp.learner.rank_random_state import load_rank_generators, save_rank_generators

LAYOUT = "tp2"


def draw(learner: RankLearner) -> list[float]:
    """A number from each generator; tensor-parallel ranks differ in the tracker's."""
    with megatron_device(CPU):
        with get_cuda_rng_tracker().fork():
            tracked = torch.rand(1).item()
        return [random.random(), np.random.rand(), torch.rand(1).item(), tracked]


def drawn_twice(rank: int, world: int, model: str, folder: Path) -> list[list[float]]:
    with learner_on(settings(model, LAYOUTS[LAYOUT], recipe().needs)) as (learner, own):
        before = draw(own)
        learner.call(save_rank_generators, folder)
        after = draw(own)
    with learner_on(settings(model, LAYOUTS[LAYOUT], recipe().needs)) as (learner, own):
        anew = draw(own)
        learner.call(load_rank_generators, folder)
        return [before, after, anew, draw(own)]


def test_ranks_draw_on_where_they_stopped(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3-tied")
    ranks = run_ranks(2, drawn_twice, model, tmp_path / "generators")
    for before, after, anew, resumed in ranks:
        assert anew == before, "a rank begins from the seed"
        assert resumed == after
        assert not set(before) & set(after)
    assert ranks[0][0][-1] != ranks[1][0][-1]
    files = sorted((tmp_path / "generators").iterdir())
    assert [file.name for file in files] == ["rank_0.json", "rank_1.json"]
    assert "model-parallel-rng" in GeneratorStates.model_validate_json(files[0].read_text()).tracked
