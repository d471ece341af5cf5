"""A reward that a model with random weights earns about half of the time, so that groups are mixed."""

from __future__ import annotations

from megasharp.common.records import TaskAnswer


def judge(text: str, answer: TaskAnswer) -> float:
    """Give 1 for an even sum of the text's characters."""
    return float(sum(map(ord, text)) % 2 == 0)
