"""When copies are compared, and what a difference says. Learners and checkpoints are stand-ins, named as such."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasharp.common.errors import RunFailed
from megasharp.learner.replicas import Checksums
from megasharp.metrics.clock import StageClock
from megasharp.trainer.checkpoints import ReplicaCheck


class StandIn:
    """Two ranks, and how often they were asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.sums = [1, 1]

    def call(self, function: object) -> list[Checksums]:
        self.asked += 1
        return [Checksums(f"host{rank}", {"w": value}) for rank, value in enumerate(self.sums)]


class Made:
    """A check over stand-ins of a policy, a memory network and checkpoints."""

    def __init__(self, every: int, world: int = 2) -> None:
        self.policy, self.memory, self.clock = StandIn(), StandIn(), StageClock()
        self.checkpoints = SimpleNamespace(
            start=SimpleNamespace(step=0), newest=Path("run/step_000004"), finished=0, finish=self._finish
        )
        config = SimpleNamespace(
            guard=SimpleNamespace(replica_check_every=every), checkpoint=SimpleNamespace(every=4), steps=9
        )
        resolved: Any = SimpleNamespace(config=config, layout=SimpleNamespace(world=world))
        learners: Any = SimpleNamespace(policy=self.policy, memory=self.memory)
        checkpoints: Any = self.checkpoints
        self.check = ReplicaCheck(resolved, checkpoints, learners, self.clock)

    def _finish(self) -> None:
        self.checkpoints.finished += 1


def test_copies_are_compared_at_the_interval_and_before_saves_once_a_step() -> None:
    made, found = Made(every=3), []
    for step in range(1, 10):
        before = made.policy.asked
        made.check.around_update(step, True)
        found += [step] * (made.policy.asked - before)
        made.check.before_save(8 if step == 8 else found[-1] if found else 0)
    assert found == [3, 4, 6, 8, 9] and made.memory.asked == 5
    assert made.clock.take()["replica_check"] > 0.0
    made.check.before_save(10)
    assert made.policy.asked == 6


def test_copies_are_compared_before_the_update_that_would_gather_them_anew() -> None:
    made = Made(every=3)
    made.policy.sums = [1, 2]
    for step in (1, 2, 4):
        made.check.around_update(step, False)
    with pytest.raises(RunFailed, match="corruption: before the update of step 6, w differs"):
        made.check.around_update(6, False)


@pytest.mark.parametrize(("every", "world"), [(0, 2), (3, 1)])
def test_nothing_is_compared_where_that_is_off_or_there_is_one_rank(every: int, world: int) -> None:
    made = Made(every, world)
    for step in range(1, 10):
        made.check.around_update(step, True)
        made.check.before_save(step)
    assert made.policy.asked == 0 and "replica_check" not in made.clock.take()


def test_a_difference_names_network_and_checkpoint_and_may_be_retried() -> None:
    made = Made(every=3)
    made.memory.sums = [1, 2]
    with pytest.raises(RunFailed) as stopped:
        made.check.around_update(3, True)
    assert stopped.value.exit_code == 1 and made.checkpoints.finished == 1
    assert str(stopped.value) == (
        "silent data corruption: after step 3, memory network: w differs between rank 0 (host0) and rank 1 (host1) "
        "(1 of 1 compared tensors); nothing was saved of it, and the last good checkpoint is run/step_000004: --resume "
        "and --retries go on from there; leave out a host that is named again"
    )
    made.checkpoints.newest = None
    with pytest.raises(RunFailed, match="nor before: start again"):
        made.check.before_save(3)
