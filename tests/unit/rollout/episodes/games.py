"""A tokenizer of letters and environments for tests, small enough to be followed by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megasharp.tasks.environment import Environment, EnvironmentAnswer, Observation

# Letters are tokens from here on; 2 ends a turn.
FIRST = 3
END = 2


# Set by a test that is over: what blocks, blocks until then.
RELEASED = threading.Event()


class Letters:
    """A stand-in for a tokenizer: one token a letter from a to t, no chat template."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(FIRST + ord(letter) - ord("a") for letter in text)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token - FIRST) for token in tokens if token >= FIRST)

    def chat(self, turns: tuple[tuple[str, str], ...], tools: str = "") -> str | None:
        return None


class Echo(Environment):
    """Answers with the action's first letters, rewards each turn by its length, and ends after `turns` turns."""

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.left, self.said = row.get("turns", 3), list[str]()
        return Observation("ab")

    async def step(self, action: str) -> Observation:
        self.said.append(action)
        self.left -= 1
        await asyncio.sleep(0)
        info = {"answer": "/".join(self.said), "correct": len(action) % 2 == 0}
        return Observation(f"q{action[:2]}", reward=len(action) / 8, done=not self.left, info=info)


class Raises(Echo):
    """Raises in its second turn: with three turns an error, with fewer what programs leave to others."""

    async def step(self, action: str) -> Observation:
        if self.said:
            raise RuntimeError("the board is lost") if self.left > 1 else KeyboardInterrupt
        return await super().step(action)


class Sleeps(Echo):
    """Takes its time."""

    asleep = threading.Event()

    async def step(self, action: str) -> Observation:
        self.asleep.set()
        await asyncio.sleep(60)
        return await super().step(action)


class Blocks(Echo):
    """Keeps the event loop to itself."""

    async def step(self, action: str) -> Observation:
        RELEASED.wait(30)
        return await super().step(action)


class Plain:
    """Plain functions: `sleeps` in the row has them block, `returns` return what is no observation."""

    def reset(self, row: Mapping[str, Any]) -> Observation:
        self.row = row
        return Observation("ab")

    def step(self, action: str) -> Any:
        kind: int = self.row["turns"]
        if kind == 1:
            RELEASED.wait(30)
        if kind == 5:
            raise asyncio.CancelledError
        if kind == 15:
            raise KeyboardInterrupt
        wrong: Any = {
            2: "text",
            3: Observation(reward=float("nan")),
            4: Observation(messages=({"role": "user"},)),
            6: Observation(messages=None),
            7: Observation(info=None),
            # A number of NumPy's is one.
            9: Observation(reward=np.float32(1.0), done=True, info={"correct": np.bool_(True)}),
            10: Observation(reward=10**400),
            11: Observation(done=np.array([True, False])),
            12: Observation(done=True, info={"correct": "False"}),
            13: Observation(messages=["hello"]),
            14: Observation(messages=[{"role": "user", "content": "ab"}], done=True),
        }
        return wrong.get(kind, Observation(messages=[("user", "ab")], reward=0.5, done=kind != 8))


class Unmade(Echo):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no board")


class Hurries(Echo):
    """Ends at once from the second time on that it is made."""

    made = 0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        type(self).made += 1
        return await super().reset(row)

    async def step(self, action: str) -> Observation:
        return replace(await super().step(action), done=self.made > 1)


class Crowd(Echo):
    """Counts how many take a step at the same time."""

    now, most = 0, 0

    async def step(self, action: str) -> Observation:
        type(self).now += 1
        type(self).most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        type(self).now -= 1
        return await super().step(action)


class Regrets(Echo):
    """Rewards less each time that it is made."""

    made = 0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        type(self).made += 1
        return await super().reset(row)

    async def step(self, action: str) -> Observation:
        return replace(await super().step(action), reward=1.0 / self.made)


class Lingers(Echo):
    """Takes its time to close."""

    async def close(self) -> None:
        await asyncio.sleep(60)


class Forgets(Echo):
    """Answers differently each time that it is made."""

    made = 0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        type(self).made += 1
        return await super().reset(row)

    async def step(self, action: str) -> Observation:
        one = await super().step(action)
        return Observation("abcdefgh"[self.made % 8], reward=one.reward, done=one.done)


GAMES = {
    each.__name__.lower(): each
    for each in (Echo, Raises, Sleeps, Forgets, Blocks, Plain, Unmade, Hurries, Crowd, Regrets, Lingers)
}


@dataclass(frozen=True, slots=True)
class Game(EnvironmentAnswer):
    """A problem of one of these environments."""

    name: str
    turns: int = 3

    @property
    def row(self) -> Mapping[str, Any]:
        return {"turns": self.turns}

    def environment(self) -> Environment:
        return GAMES[self.name]()
