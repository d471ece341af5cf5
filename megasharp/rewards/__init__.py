"""Verifiers: pure functions that judge a response's text against a task's answer, and the table of them."""

from __future__ import annotations

from megasharp.rewards import countdown, math
from megasharp.rewards.judge import Verifier

VERIFIERS: dict[str, Verifier] = {
    "countdown": countdown.verify,
    "math": math.verify,
}
