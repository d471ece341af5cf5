"""Limits on verdicts that only what hangs can meet: what must be judged beside it has all the time that it needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from waiting import HANG_S

from megasharp.common.records import Verdict
from megasharp.tasks.judge import Item
from megasharp.tasks.sandbox.pool import Worker


def limit_only(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[Item], bool]) -> None:
    """Workers keep a pool's limit for these items, and one that only a hang reaches for all others."""
    ask = Worker.ask

    def patiently(worker: Worker, item: Item, seconds: float) -> Verdict:
        return ask(worker, item, seconds if hangs(item) else HANG_S)

    monkeypatch.setattr(Worker, "ask", patiently)
