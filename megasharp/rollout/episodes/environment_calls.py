"""Calls of environments: so many at once, each within a time limit, and what an environment does wrong in words.

An environment's code is a user's. Whatever it raises, returns or does not return in time ends its own response only.
The exception is code that blocks: coroutines share one event loop, so while one of them computes or sleeps without
`await`, no other goes on and no time limit is kept. `blocked_place` finds it, for whoever waits for the loop.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

from megasharp.common.errors import UserError, one_line
from megasharp.config.rollout import EpisodesConfig
from megasharp.tasks.environment import (
    Environment,
    EnvironmentAnswer,
    NoObservation,
    Observation,
    Row,
    called,
    checked,
)


class EnvironmentFailed(Exception):
    """An environment raised, took too long, or returned what is no observation."""


class Calls:
    """Calls environments, `limits.at_once` at the same time, each for at most `limits.step_timeout_s`."""

    def __init__(self, limits: EpisodesConfig) -> None:
        self._limit_s = limits.step_timeout_s
        self._at_once = asyncio.Semaphore(limits.at_once)

    async def make(self, answer: EnvironmentAnswer) -> Environment:
        """Make an environment, in a thread: its class may compute. Raises EnvironmentFailed."""
        try:
            made: Environment = await self._within(answer.environment, f"making {type(answer).__name__}")
        except UserError as error:
            # The class could be made when its problems were read.
            raise EnvironmentFailed(str(error)) from error
        return made

    async def reset(self, environment: Environment, row: Row) -> Observation:
        """Begin an episode. Raises EnvironmentFailed."""
        return _checked(await self._call(environment, "reset", row), environment, "reset")

    async def step(self, environment: Environment, action: str) -> Observation:
        """Answer a turn of the policy. Raises EnvironmentFailed."""
        return _checked(await self._call(environment, "step", action), environment, "step")

    async def close(self, environment: Environment) -> None:
        """Release what the environment holds. Raises EnvironmentFailed."""
        if hasattr(environment, "close"):
            await self._call(environment, "close")

    async def _call(self, environment: Environment, method: str, *arguments: object) -> Any:
        name, own = f"{type(environment).__name__}.{method}", sys.modules.get(type(environment).__module__)
        return await self._within(getattr(environment, method), name, *arguments, file=getattr(own, "__file__", None))

    async def _within(self, method: Callable[..., Any], name: str, *arguments: object, file: str | None = None) -> Any:
        async with self._at_once:
            limit = asyncio.timeout(self._limit_s)
            try:
                async with limit:
                    return await called(method, *arguments)
            except (UserError, GeneratorExit):
                raise
            except BaseException as error:  # an environment is a user's program
                task = asyncio.current_task()
                # One that is cancelled may have cancelled itself.
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                late = f"{name} took longer than {self._limit_s:g} s (rollout.episodes.step_timeout_s)"
                raise EnvironmentFailed(late if limit.expired() else _raised(name, error, file)) from error


def _raised(name: str, error: BaseException, file: str | None) -> str:
    """Say what was raised, and where: in the file of the environment's class, if it is on the way."""
    places = traceback.extract_tb(error.__traceback__)
    place = next((place for place in reversed(places) if place.filename == file), places[-1])
    return f"{name} raised {type(error).__name__}: {one_line(error)} ({place.filename}:{place.lineno})"


def _checked(found: object, environment: Environment, what: str) -> Observation:
    name = f"{type(environment).__name__}.{what}"
    try:
        return checked(found)
    except NoObservation as error:
        raise EnvironmentFailed(f"{name} {error}") from error


def blocked_place(thread: int) -> str:
    """Return the line at which an environment holds up the thread of its event loop: `games.py:12 in step`."""
    frame = sys._current_frames().get(thread)
    stack = [] if frame is None else traceback.extract_stack(frame)
    here = inspect.getfile(Calls)
    ours = max((number for number, place in enumerate(stack) if place.filename == here), default=-1)
    # Frames of `called` are ours too.
    own = [place for place in stack[ours + 1 :] if place.filename != inspect.getfile(Environment)]
    if ours < 0 or not own:
        return "a line that cannot be told"
    place = next(place for place in reversed(own) if place.filename == own[0].filename)
    return f"{place.filename}:{place.lineno} in {place.name}"
