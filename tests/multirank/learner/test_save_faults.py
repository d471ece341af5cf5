"""What happens to a disk while a learner saves in the background: it is loud, and the newest whole checkpoint stays.

Each fault comes after training has gone on, and before the save is completed.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import run_ranks
from policies import LAYOUTS, learner_on, packed, ragged_sequences, recipe, save_model, settings

from megasharp.checkpoint.recorded import LATEST
from megasharp.checkpoint.store import CheckpointStore, RunState, Writing
from megasharp.common.errors import UserError
from megasharp.learner.ranks.all_ranks import RanksLearner

NOBODY = 65534
Fault = Callable[[Path, ExitStack], None]


class Shards:
    """The learner's shards on their way."""

    def __init__(self, learner: RanksLearner) -> None:
        self.is_written = learner.saves_are_written
        self.finish = learner.finish_saves


@dataclass(frozen=True)
class Outcome:
    """What the second save and the resume after it said, and what was there in the end."""

    error: str
    latest: str
    said: list[str]
    resumed: int
    whole: bool


def full_disk(folder: Path, stack: ExitStack) -> None:
    """Files may not grow beyond 4 KiB, which fails writes as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)


def read_only_folder(folder: Path, stack: ExitStack) -> None:
    """Root may write everywhere, so it is nobody for that time."""
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        stack.callback(os.seteuid, 0)


def flipped_byte(folder: Path, stack: ExitStack) -> None:
    """In a file that its rank has written and hashed already."""
    shard = next(folder.glob(".step_000002.partial/*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def save_with_a_fault(rank: int, world: int, root: Path, model: str, fault: Fault) -> Outcome:
    # The server that forks ranks has the umask of the test that started it: with a run's, nobody may look in.
    os.umask(0o022)
    batch, error = packed(ragged_sequences(), LAYOUTS["tp1"]), ""
    with learner_on(settings(model, LAYOUTS["tp1"], recipe().needs)) as (learner, _):

        def begin(folder: Path) -> Writing:
            learner.begin_save(folder, copy=True)
            return Shards(learner)

        store = CheckpointStore(root, keep_last=9, keep_every=None)
        learner.step(batch, recipe())
        store.begin(RunState(reference="base", step=1), begin)
        store.finish()
        with ExitStack() as stack:
            if fault is full_disk:
                fault(root, stack)
            store.begin(RunState(reference="base", step=2), begin)
            learner.step(batch, recipe())
            while not learner.saves_are_written():
                pass
            if fault is not full_disk:
                fault(root, stack)
            try:
                store.poll()
            except UserError as caught:
                error = str(caught)
        root.chmod(0o755)
        latest = (root / LATEST).read_text().strip()
        said: list[str] = []
        found = CheckpointStore(root, keep_last=9, keep_every=None).take_up(said.append)
        assert found is not None
        learner.load(found[0])
        return Outcome(error, latest, said, found[1].step, (root / LATEST).read_text().strip() == found[0].name)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may look into, as pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def outcome_of(folder: Path, fault: Fault) -> Outcome:
    root = folder / "checkpoints"
    (outcome,) = run_ranks(1, save_with_a_fault, root, save_model(folder, "qwen3-tied"), fault)
    assert outcome.resumed == 1 and outcome.whole
    assert sorted(path.name for path in root.glob("step_*")) == ["step_000001"]
    assert not [*root.glob(".*")]
    return outcome


@pytest.mark.parametrize(
    ("fault", "reason"), [(full_disk, "no space left on the disk"), (read_only_folder, "Permission denied")]
)
def test_a_disk_that_cannot_be_written(folder: Path, fault: Fault, reason: str) -> None:
    outcome = outcome_of(folder, fault)
    assert "\n" not in outcome.error and reason in outcome.error
    assert "step_000002" in outcome.error and "newest complete step: 1" in outcome.error
    assert outcome.latest == "step_000001" and outcome.said == []


def test_a_byte_that_flips_before_the_save_is_complete(folder: Path) -> None:
    """The hash is of what was written, not of what is read later: the resume sees it, says so, and falls back."""
    outcome = outcome_of(folder, flipped_byte)
    assert outcome.error == ""
    (line,) = outcome.said
    assert "step_000002/" in line and "differs from what was saved; step_000002 is now damaged_step_000002" in line
    assert (folder / "checkpoints" / "damaged_step_000002").is_dir()
