"""Saves a run and restores it: all learners' shards, the files that describe their models, and the driver's state.

A checkpoint is a Megatron folder of the policy; `memory/` in it is one of the memory network. `Checkpoints` writes and
reads one, `Saver` gathers what a running run's holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megasharp.checkpoint.manifest import Inputs
from megasharp.checkpoint.rollout_store import read_replay, read_unfinished, write_replay, write_unfinished
from megasharp.checkpoint.store import CheckpointStore, RunState, Writing
from megasharp.common.control import Control
from megasharp.common.errors import RankDied, RunFailed, UserError
from megasharp.common.files import FileHash, write_text
from megasharp.common.random_state import GeneratorStates, generator_states, restore_generators
from megasharp.convert.architecture import record_arguments
from megasharp.convert.hf_write import carry_over, write_hf_folder
from megasharp.learner.learner import RankLearner
from megasharp.learner.rank_random_state import RANK_FILES, load_rank_generators, save_rank_generators
from megasharp.learner.ranks.all_ranks import RanksLearner
from megasharp.learner.replicas import difference
from megasharp.metrics.clock import StageClock
from megasharp.rollout.in_flight import Unfinished
from megasharp.tasks.stream import PromptStream
from megasharp.trainer.engine_setup import Collector, VersionedSync
from megasharp.trainer.factories import Learners
from megasharp.trainer.resolve.models import MEMORY_PART
from megasharp.trainer.resolve.resolved_run import MemoryFolder, ResolvedRun
from megasharp.trainer.resume import check_recorded
from megasharp.trainer.step_log import StepLog

# The part of a checkpoint that holds the reference's weights, once a reset has made them others than the run's first.
REFERENCE = "reference"
# The part that holds the random number generators of the driver and of every rank.
GENERATORS = "generators"
_POLICY, _HF, _DRIVER = "policy", "hf", "driver.json"


@dataclass(frozen=True, slots=True)
class DriverState:
    """This process's part of a checkpoint: its random generators, and the prompts that no step has trained on."""

    generators: GeneratorStates
    unfinished: Sequence[Unfinished]


class Checkpoints:
    """The checkpoints of a run that holds its folder. With `checkpoint.asynchronous` training goes on meanwhile."""

    def __init__(
        self,
        resolved: ResolvedRun,
        folder: Path,
        say: Callable[[str], None],
        on_complete: Callable[[int], object] = int,
    ) -> None:
        config = resolved.config.checkpoint
        self._resolved = resolved
        self._say = say
        self._store = CheckpointStore(folder, config.keep_last, config.keep_every, on_complete)
        self._found = self._store.take_up(lambda problem: say(f"passing over a damaged checkpoint: {problem}"))

    @property
    def start(self) -> RunState:
        """The state that the run continues from; its beginning where there is no checkpoint."""
        return self._found[1] if self._found else RunState(reference=str(self._resolved.model.path))

    @property
    def exists(self) -> bool:
        """True where there is a checkpoint to continue from."""
        return self._found is not None

    def load(self, learners: Learners) -> None:
        """Fill the learners from the checkpoint to continue from, and set all random generators as they were."""
        assert self._found is not None
        folder, state = self._found
        self._check_recorded(folder, folder / _POLICY, self._resolved)
        learners.policy.load(folder / _POLICY)
        if learners.memory is not None:
            assert self._resolved.memory is not None
            weights = _memory_weights(folder / MEMORY_PART)
            self._check_recorded(folder / MEMORY_PART, weights, self._resolved.memory)
            learners.memory.learner.load(weights)
            learners.memory.take_up(read_replay(folder / MEMORY_PART))
        if state.reference == REFERENCE:
            learners.policy.load_reference(folder / REFERENCE)
        # The ranks' generators first: one of the ranks may be this process, whose own come last.
        folder = folder / GENERATORS
        ranks, world = len([*folder.glob(RANK_FILES)]), self._resolved.layout.world
        if ranks == world:
            learners.policy.call(load_rank_generators, folder)
        else:
            self._say(
                f"{folder} has the random number generators of {ranks} ranks, not of {world}: the ranks' restart "
                "from the run's seed (sampling and training draw from none of them)"
            )
        if (folder / _DRIVER).is_file():
            text = (folder / _DRIVER).read_text(encoding="utf-8")
            restore_generators(GeneratorStates.model_validate_json(text))

    def _check_recorded(self, folder: Path, weights: Path, network: ResolvedRun | MemoryFolder) -> None:
        for line in check_recorded(folder, weights, network.model.description, network.architecture):
            self._say(line)

    @property
    def newest(self) -> Path | None:
        """The folder of the newest complete checkpoint."""
        return self._store.newest_complete

    def protect(self, best: int | None) -> None:
        """Keep this step's checkpoint from retention."""
        self._store.best = best

    def load_unfinished(self) -> tuple[Unfinished, ...]:
        """Return what had been sampled of the first prompts that the run continues with."""
        return read_unfinished(self._found[0]) if self._found else ()

    def save(self, state: RunState, learners: Learners, driver: DriverState, *, wait: bool) -> None:
        """Save `state` and the learners; with `wait` the checkpoint is complete on return."""
        copy = self._resolved.config.checkpoint.asynchronous and not wait
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
        resolved = self._resolved
        write_unfinished(folder, driver.unfinished)
        write_text(folder / GENERATORS / _DRIVER, driver.generators.model_dump_json())
        generators = dict(learners.policy.call(save_rank_generators, folder / GENERATORS))
        if state.reference == REFERENCE:
            # First: it takes the policy's place for a moment, whose weights may be on their way uncopied later.
            (folder / REFERENCE).mkdir()
            learners.policy.begin_save_reference(folder / REFERENCE)
        _begin_model(resolved, learners.policy, folder, copy)
        saving = [learners.policy]
        if learners.memory is not None:
            assert resolved.memory is not None
            (folder / MEMORY_PART).mkdir()
            write_replay(folder / MEMORY_PART, learners.memory.recent)
            _begin_model(resolved.memory, learners.memory.learner, folder / MEMORY_PART, copy)
            saving.append(learners.memory.learner)
        if resolved.config.checkpoint.export_hf:
            write_hf_folder(folder / "hf_export", resolved.model.description, learners.policy.export_weights())
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


class ReplicaCheck:
    """Compares what ranks hold copies of, around the update of each `guard.replica_check_every`-th step, and for saves.

    Before the update weights are compared that were there while the step was sampled: the update gathers them anew.
    No checkpoint is written of weights that a machine has damaged. Nothing is done where there is one rank.
    """

    def __init__(self, resolved: ResolvedRun, checkpoints: Checkpoints, learners: Learners, clock: StageClock) -> None:
        self._config = resolved.config
        self._is_on = resolved.config.guard.replica_check_every > 0 and resolved.layout.world > 1
        self._checkpoints = checkpoints
        self._learners = learners
        self._clock = clock
        self._checked = checkpoints.start.step

    def around_update(self, step: int, updated: bool) -> None:
        """Compare where that is due before or after a step's update; its seconds are the stage `replica_check`.

        Raises:
            RunFailed: copies differ; the message names ranks, tensor and the checkpoint to go on from.
        """
        is_due = self._is_on and step % self._config.guard.replica_check_every == 0
        is_saved = self._is_on and (step == self._config.steps or step % self._config.checkpoint.every == 0)
        if is_due or (updated and is_saved):
            with self._clock.stage("replica_check"):
                if updated:
                    self.before_save(step)
                else:
                    self._compare(f"before the update of step {step}")

    def before_save(self, step: int) -> None:
        """Compare unless that was done after this step. Raises as `around_update`."""
        if self._is_on and self._checked != step:
            self._compare(f"after step {step}")
            self._checked = step

    def _compare(self, when: str) -> None:
        for name, learner in (("", self._learners.policy), ("memory network: ", self._learners.memory)):
            found = difference(learner.call(RankLearner.replica_checksums)) if learner is not None else None
            if found is not None:
                raise RunFailed(f"silent data corruption: {when}, {name}{found}; {self._good()}")

    def _good(self) -> str:
        # One that is under way was begun with copies that were equal.
        with suppress(UserError, RankDied):
            self._checkpoints.finish()
        newest = self._checkpoints.newest
        if newest is None:
            return "nothing was saved of it, nor before: start again, on other hosts if it comes back"
        there = f"the last good checkpoint is {newest}: --resume and --retries go on from there"
        return f"nothing was saved of it, and {there}; leave out a host that is named again"


class Saver:
    """Saves where a run stands, with what its parts know of it besides the learners' shards."""

    def __init__(
        self,
        resolved: ResolvedRun,
        checkpoints: Checkpoints,
        learners: Learners,
        prompts: PromptStream,
        rollouts: Collector,
        sync: VersionedSync,
        control: Control,
        inputs: Inputs,
        log: StepLog,
        clock: StageClock,
        replicas: ReplicaCheck,
    ) -> None:
        self._resolved = resolved
        self._checkpoints = checkpoints
        self._learners = learners
        self._prompts = prompts
        self._rollouts = rollouts
        self._sync = sync
        self._control = control
        self._inputs = inputs
        self._log = log
        self._clock = clock
        self._replicas = replicas
        # As they were after the last step, also when the next one has begun: a save between two steps may come late.
        self._generators = generator_states()

    @property
    def start(self) -> RunState:
        """The state that the run continues from; the defaults are a run's beginning."""
        return self._checkpoints.start

    @property
    def is_resumed(self) -> bool:
        """True where `start` is that of a checkpoint."""
        return self._checkpoints.exists

    def step_done(self) -> None:
        """Note the random generators' states after a step."""
        self._generators = generator_states()

    def poll(self) -> None:
        """Complete the checkpoint under way, if all of it is written."""
        self._checkpoints.poll()

    def finish(self) -> None:
        """Wait for the checkpoint under way, if there is one, and complete it."""
        with self._clock.stage("checkpoint"):
            self._checkpoints.finish()

    def save(self, step: int, skipped_in_a_row: int, *, wait: bool = False) -> None:
        """Save where the run stands after `step`; with `wait`, or after its last step, it is complete on return.

        Raises RunFailed, and saves nothing, where ranks hold different copies.
        """
        # A resumed run leaves out steps that it has a checkpoint of: their rows must be there.
        self._log.sync()
        control, prompts = self._control.state, self._prompts
        unfinished = self._rollouts.unfinished()
        waiting = [(place.epoch, place.position) for place in prompts.pending]
        # A reset has made other weights than the run's first ones the reference, in this attempt or an earlier one.
        moved = self.start.reference == REFERENCE or any("reference" in reset.what for reset in control.resets.done)
        state = RunState(
            step=step,
            policy_version=self._sync.version,
            memory_version=max(self._sync.memory_version, 0),
            cursor_epoch=prompts.cursor.epoch,
            cursor_position=prompts.cursor.position,
            sources=prompts.sources,
            pending=(*(prompt.place for prompt in unfinished), *waiting),
            reference=REFERENCE if moved else str(self._resolved.model.path),
            skipped_in_a_row=skipped_in_a_row,
            control=control,
            inputs=self._inputs,
        )
        is_last = step == self._resolved.config.steps or self._control.over()
        with self._clock.stage("checkpoint"):
            self._replicas.before_save(step)
            driver = DriverState(self._generators, unfinished)
            self._checkpoints.save(state, self._learners, driver, wait=wait or is_last)
        self._log.write_apart(step, "checkpoint")


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
