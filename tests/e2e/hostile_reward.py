"""A reward that fails on a few responses, and puts into its error what a terminal would obey."""

from __future__ import annotations

from megasharp.common.records import TaskAnswer

# Clears the screen, and writes text from right to left; in brackets what rich would take for a style.
EVIL = "\x1b[2Jgone\x9b31m\x7f\u202e[red]"
SHOWN = r"\x1b[2Jgone\x9b31m\x7f\u202e[red]"


def judge(text: str, answer: TaskAnswer) -> float:
    """Fail on about one response of eight, but on none of the made-up ones that a run begins with."""
    if 4 < len(text) < 20 and sum(map(ord, text)) % 8 == 1:
        raise ValueError(f"no reward for {EVIL}")
    return 0.5
