"""An environment of a user's own, to which the problem file beside it points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasharp.tasks.environment import Environment, Observation


class Guess(Environment):
    """Thinks of a number."""

    def __init__(self, most: int) -> None:
        self.most = most

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.number = row["seed"] % self.most
        return Observation(f"guess a number below {self.most}: ")

    async def step(self, action: str) -> Observation:
        right = action.strip() == str(self.number)
        return Observation("no: ", reward=float(right), done=right)
