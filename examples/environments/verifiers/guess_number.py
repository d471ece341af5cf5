"""A game for the package `verifiers` (0.4): a number from 0 to 9, guessed in four turns; knows nothing of megasharp."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import verifiers.v1 as vf

TRIES = 4


class GuessData(vf.TaskData):
    """A task: its prompt and its number."""

    number: int


class GuessTask(vf.Task[GuessData]):
    """Its rubric."""

    @vf.reward
    async def guessed(self, task: GuessData, trace: vf.Trace) -> float:
        """1 where the last guess is the number."""
        return float(trace.last_reply.strip() == str(task.number))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """Tasks without end."""

    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        """Draw a number for each."""
        rng = Random(1)
        while True:
            yield GuessTask(GuessData(prompt="0 to 9:", number=rng.randrange(10)), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    """One role."""

    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Tells after each guess whether the number is higher or lower."""

    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        """Play a game."""
        async with agents.player.interaction(task) as game:
            said = await game.turn()
            for _ in range(TRIES - 1):
                if said.terminated or said.last_reply == str(task.data.number):
                    return
                said = await game.turn("\nhigher:" if said.last_reply < str(task.data.number) else "\nlower:")


__all__ = ["GuessEnv", "GuessTaskset"]
