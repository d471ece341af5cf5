"""A rank's random number generators in a checkpoint: `rank_<number>.json`, those of Megatron's tracker among them.

They belong to a rank's number in its world, so another number of ranks cannot restore them: each then restarts from the
run's seed.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from megatron.core.tensor_parallel.random import convert_cuda_rng_state, get_cuda_rng_tracker

from megasharp.common.files import FileHash, write_text
from megasharp.common.random_state import GeneratorStates, as_text, from_text, generator_states, restore_generators
from megasharp.learner.learner import RankLearner

RANK_FILES = "rank_*.json"


def save_rank_generators(learner: RankLearner, folder: Path) -> tuple[Path, FileHash]:
    """Write the states of this rank's generators into `folder`; returns the file."""
    tracked = {
        name: as_text(convert_cuda_rng_state(state)) for name, state in get_cuda_rng_tracker().get_states().items()
    }
    states = generator_states().model_copy(update={"tracked": tracked})
    write_text(_file(folder), states.model_dump_json())
    return _file(folder), FileHash.of(_file(folder))


def load_rank_generators(learner: RankLearner, folder: Path) -> None:
    """Restore the states that the rank of this number wrote."""
    states = GeneratorStates.model_validate_json(_file(folder).read_text(encoding="utf-8"))
    restore_generators(states)
    get_cuda_rng_tracker().set_states({name: from_text(text) for name, text in states.tracked.items()})


def _file(folder: Path) -> Path:
    return folder / RANK_FILES.replace("*", str(dist.get_rank()))
