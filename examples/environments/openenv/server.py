"""An OpenEnv server with a game: guess a number from 0 to 9, and learn whether the guess is too low or too high.

    python server.py --port 8765

It is run by a Python that has the package `openenv` (0.10), and knows nothing of megasharp.
"""

from __future__ import annotations

import argparse
from random import Random
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

TRIES = 4
SESSIONS = 512


class Guess(Action):
    """A guess."""

    number: int


class Answer(Observation):
    """The answer to a guess."""

    said: str


class GuessEnvironment(Environment[Guess, Answer, State]):
    """The game; each session has one of its own."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Answer:
        """Draw the number from the seed."""
        self.number = Random(seed).randrange(10)
        self.left = TRIES
        return Answer(said="0 to 9")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Answer:
        """Compare a guess."""
        self.left -= 1
        right = action.number == self.number
        said = "right" if right else "higher" if action.number < self.number else "lower"
        return Answer(said=said, reward=float(right), done=right or not self.left)

    @property
    def state(self) -> State:
        """The number of guesses so far."""
        return State(step_count=TRIES - self.left)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8765)
    app = create_app(GuessEnvironment, Guess, Answer, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
