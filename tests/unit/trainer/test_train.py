"""How a run's time is told before its first step."""

from __future__ import annotations

from contextlib import ExitStack
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

    monkeypatch.setattr(run, "StageClock", lambda **_: clock)
    monkeypatch.setattr(run, "Checkpoints", read)
    any_ = SimpleNamespace(config=None, checkpoints=None, age=0.0)
    with pytest.raises(InterruptedError):
        run._Run(any_, any_, any_, (), print, ExitStack())  # type: ignore[arg-type]
    assert stages == ["start"]
