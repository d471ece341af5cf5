"""Verifiers: pure functions that judge a response's text against a task's answer, and the table of them."""

from __future__ import annotations

from collections.abc import Callable

from megasharp.rewards import countdown
from megasharp.types import TaskAnswer, Verdict

Verifier = Callable[[str, TaskAnswer], Verdict]

VERIFIERS: dict[str, Verifier] = {
    "countdown": countdown.verify,
}
