"""The time of a run before its first step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megasharp.metrics.clock import StageClock
from megasharp.trainer import run


def test_reading_the_checkpoint_to_go_on_from_counts_as_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its files are hashed: minutes for a large model."""
    clock, stages = StageClock(), list[str]()

    def read(*_: object) -> None:
        stages.append(clock.present()[0])
        raise InterruptedError

    monkeypatch.setattr(run, "Checkpoints", read)
    any_ = SimpleNamespace(checkpoints=None, saved=None)
    with pytest.raises(InterruptedError):
        run._open_checkpoints(any_, any_, any_, (), clock, print)  # type: ignore[arg-type]
    assert stages == ["start"]
