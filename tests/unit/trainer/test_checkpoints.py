"""Where the parts of a checkpoint lie, and which of them a resumed run reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from cases import each_case

from megasharp.checkpoint.store import RunState
from megasharp.common.files import FileHash
from megasharp.common.random_state import generator_states
from megasharp.config.run_config import load_run
from megasharp.learner.ranks.all_ranks import RanksLearner
from megasharp.trainer.checkpoints import REFERENCE, Checkpoints, DriverState, _memory_weights
from megasharp.trainer.factories import Learners
from megasharp.trainer.resolve.resolved_run import check

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "run.yaml"


class Policy:
    """A learner that writes one small file where it is asked to, and tells what it has read."""

    def __init__(self) -> None:
        self.read: list[tuple[str, str]] = []

    def begin_save(self, folder: Path, copy: bool) -> None:
        (folder / "shard").write_text("policy")

    def begin_save_reference(self, folder: Path) -> None:
        (folder / "shard").write_text("reference")

    def saves_are_written(self) -> bool:
        return True

    def finish_saves(self) -> dict[Path, FileHash]:
        return {}

    def call(self, function: Callable[..., Any], *args: object) -> list[Any]:
        return []

    def load(self, folder: Path) -> None:
        self.read.append(("policy", (folder / "shard").read_text()))

    def load_reference(self, folder: Path) -> None:
        self.read.append(("reference", (folder / "shard").read_text()))


def test_a_memory_network_is_found_where_older_versions_wrote_it(tmp_path: Path) -> None:
    assert _memory_weights(tmp_path) == tmp_path
    (tmp_path / "policy").mkdir()
    assert _memory_weights(tmp_path) == tmp_path / "policy"


@each_case(("reference", "read"), [(REFERENCE, ["policy", "reference"]), ("models/first", ["policy"])])
def test_a_reference_that_a_reset_moved_comes_back(tmp_path: Path, reference: str, read: list[str]) -> None:
    """Otherwise the penalty of a resumed run would be to the run's first weights."""
    resolved, folder = check(load_run(QUICKSTART), "run.yaml"), tmp_path / reference.replace("/", "_")
    saving, loading = Policy(), Policy()
    driver = DriverState(generator_states(), ())
    checkpoints = Checkpoints(resolved, folder, print)
    checkpoints.save(RunState(reference, step=3), Learners(cast(RanksLearner, saving), None), driver, wait=True)
    Checkpoints(resolved, folder, print).load(Learners(cast(RanksLearner, loading), None))
    assert loading.read == [(part, part) for part in read]
