"""Limits on verdicts that only what hangs can meet: what must be judged beside it has all the time that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from waiting import HANG_S

from megasharp.common.records import Verdict
from megasharp.tasks.judge import Item
from megasharp.tasks.sandbox.pool import Worker


def limit_only(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[Item], bool]) -> None:
    """Workers keep a pool's limit for these items, and one that only a hang reaches for all others."""
    ask = Worker.ask

    def patiently(worker: Worker, items: Sequence[Item], seconds: float, whole: bool = False) -> list[Verdict]:
        return ask(worker, items, seconds if any(map(hangs, items)) else HANG_S, whole)

    monkeypatch.setattr(Worker, "ask", patiently)
