"""What a run saves, and how it comes back: all learners' shards, and what describes their models beside them.

A checkpoint is a Megatron folder of the policy; `memory/` in it is one of the memory network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasharp.checkpoint.rollout_store import read_unfinished, write_unfinished
from megasharp.checkpoint.store import CheckpointStore, RunState, Writing
from megasharp.common.files import FileHash, write_text
from megasharp.common.random_state import GeneratorStates, restore_generators
from megasharp.convert.architecture import record_arguments
from megasharp.convert.hf_write import carry_over, write_hf_folder
from megasharp.learner.rank_random_state import RANK_FILES, load_rank_generators, save_rank_generators
from megasharp.learner.ranks.all_ranks import RanksLearner
from megasharp.rollout.in_flight import Unfinished
from megasharp.trainer.factories import Learners
from megasharp.trainer.resolve.models import MEMORY_PART
from megasharp.trainer.resolve.resolved_run import MemoryFolder, ResolvedRun
from megasharp.trainer.resume import check_recorded

# The part of a checkpoint that holds the reference's weights, once a reset has made them others than the run's first.
REFERENCE = "reference"
# The part that holds the random number generators of the driver and of every rank.
GENERATORS = "generators"
_POLICY, _HF, _DRIVER = "policy", "hf", "driver.json"


@dataclass(frozen=True, slots=True)
class DriverState:
    """What is saved of this process: its random number generators, and the prompts that no step has trained on."""

    generators: GeneratorStates
    unfinished: Sequence[Unfinished]


class Checkpoints:
    """The checkpoints of a run that holds its folder. With `checkpoint.asynchronous` training goes on meanwhile."""

    def __init__(self, checked: ResolvedRun, folder: Path, say: Callable[[str], None]) -> None:
        config = checked.config.checkpoint
        self._checked = checked
        self._say = say
        self._store = CheckpointStore(folder, config.keep_last, config.keep_every)
        self._found = self._store.take_up(lambda problem: say(f"passing over a damaged checkpoint: {problem}"))

    @property
    def start(self) -> RunState:
        """Where the run goes on; its beginning where there is no checkpoint."""
        return self._found[1] if self._found else RunState(reference=str(self._checked.model.path))

    @property
    def exists(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self._found is not None

    def load(self, learners: Learners) -> None:
        """Fill the learners from the checkpoint to go on from."""
        assert self._found is not None
        folder, state = self._found
        self._check_recorded(folder, folder / _POLICY, self._checked)
        learners.policy.load(folder / _POLICY)
        if learners.memory is not None:
            assert self._checked.memory is not None
            weights = _memory_weights(folder / MEMORY_PART)
            self._check_recorded(folder / MEMORY_PART, weights, self._checked.memory)
            learners.memory.learner.load(weights)
        if state.reference == REFERENCE:
            learners.policy.load_reference(folder / REFERENCE)
        self._load_generators(folder / GENERATORS, learners)

    def _load_generators(self, folder: Path, learners: Learners) -> None:
        """The ranks' first: one of them may be this process."""
        ranks, world = len([*folder.glob(RANK_FILES)]), self._checked.layout.world
        if ranks == world:
            learners.policy.call(load_rank_generators, folder)
        else:
            self._say(
                f"{folder} has the random number generators of {ranks} ranks, not of {world}: the ranks' begin anew "
                "from the run's seed (sampling and training draw from none of them)"
            )
        if (folder / _DRIVER).is_file():
            text = (folder / _DRIVER).read_text(encoding="utf-8")
            restore_generators(GeneratorStates.model_validate_json(text))

    def _check_recorded(self, folder: Path, weights: Path, network: ResolvedRun | MemoryFolder) -> None:
        for line in check_recorded(folder, weights, network.model.description, network.architecture):
            self._say(line)

    def protect(self, best: int | None) -> None:
        """Keep this step's checkpoint from retention."""
        self._store.best = best

    def load_unfinished(self) -> tuple[Unfinished, ...]:
        """What had been sampled of the first prompts that the run goes on with."""
        return read_unfinished(self._found[0]) if self._found else ()

    def save(self, state: RunState, learners: Learners, driver: DriverState, *, wait: bool) -> None:
        """Save where the run stands; with `wait` it is complete when this returns."""
        copy = self._checked.config.checkpoint.asynchronous and not wait
        self._store.begin(state, lambda folder: self._begin(state, learners, driver, folder, copy))
        if not copy:
            self._store.finish()

    def poll(self) -> None:
        """Complete the checkpoint under way, if all of it is written."""
        self._store.poll()

    def finish(self) -> None:
        """Wait for the checkpoint under way, if there is one, and complete it."""
        self._store.finish()

    def abandon(self) -> None:
        """Give up the checkpoint under way: the run has ended."""
        self._store.abandon()

    def _begin(self, state: RunState, learners: Learners, driver: DriverState, folder: Path, copy: bool) -> Writing:
        checked = self._checked
        write_unfinished(folder, driver.unfinished)
        write_text(folder / GENERATORS / _DRIVER, driver.generators.model_dump_json())
        generators = dict(learners.policy.call(save_rank_generators, folder / GENERATORS))
        if state.reference == REFERENCE:
            # First: it takes the policy's place for a moment, whose weights may be on their way uncopied later.
            (folder / REFERENCE).mkdir()
            learners.policy.begin_save_reference(folder / REFERENCE)
        _begin_model(checked, learners.policy, folder, copy)
        saving = [learners.policy]
        if learners.memory is not None:
            assert checked.memory is not None
            (folder / MEMORY_PART).mkdir()
            _begin_model(checked.memory, learners.memory.learner, folder / MEMORY_PART, copy)
            saving.append(learners.memory.learner)
        if checked.config.checkpoint.export_hf:
            write_hf_folder(folder / "hf_export", checked.model.description, learners.policy.export_weights())
        return _Shards(saving, generators)


def _begin_model(network: ResolvedRun | MemoryFolder, learner: RanksLearner, folder: Path, copy: bool) -> None:
    """A learner's shards, and what describes its model: `megasharp convert` reads `policy` and `hf`."""
    (folder / _HF).mkdir()
    carry_over(network.model.description, folder / _HF)
    record_arguments(folder, network.architecture)
    (folder / _POLICY).mkdir()
    learner.begin_save(folder / _POLICY, copy)


def _memory_weights(folder: Path) -> Path:
    """Where a memory network's shards are: older versions wrote them without its config.json, in one folder less."""
    return folder / _POLICY if (folder / _POLICY).is_dir() else folder


class _Shards:
    """The learners whose shards are being written, and what their ranks have written already."""

    def __init__(self, learners: list[RanksLearner], written: Mapping[Path, FileHash]) -> None:
        self._learners = learners
        self._written = written

    def is_written(self) -> bool:
        return all(learner.saves_are_written() for learner in self._learners)

    def finish(self) -> Mapping[Path, FileHash]:
        shards = {path: found for learner in self._learners for path, found in learner.finish_saves().items()}
        return {**self._written, **shards}
