"""A turn with each kind of environment before a run starts, so that no model is loaded for one that cannot go on."""

from __future__ import annotations

from collections.abc import Iterable

from megasharp.common.errors import UserError
from megasharp.config.rollout import EpisodesConfig
from megasharp.rollout.episodes.environment_calls import Calls, EnvironmentFailed
from megasharp.rollout.episodes.episode import check_begin
from megasharp.rollout.episodes.episode_engine import EventLoop
from megasharp.rollout.episodes.observation_tokens import Encoder, ObservationTokens
from megasharp.tasks.environment import EnvironmentAnswer, Observation
from megasharp.tasks.judge import TaskItem


def try_turn(items: Iterable[TaskItem], tokenizer: Encoder, limits: EpisodesConfig, where: str) -> None:
    """Have one problem of each data file answer a turn, and write the answer as a run would.

    Raises UserError, beginning with `where`, for a chat template that cannot, and for an environment that blocks. One
    that fails says nothing here: it may not like the made-up turn, and failures are counted while sampling.
    """
    kinds: dict[tuple[str, str], EnvironmentAnswer] = {}
    for item in items:
        if isinstance(item.answer, EnvironmentAnswer):
            kinds.setdefault((item.task, item.source), item.answer)
    if not kinds:
        return
    loop, calls, encoder = EventLoop(limits.step_timeout_s), Calls(limits), ObservationTokens(tokenizer)
    try:
        for (_, source), answer in kinds.items():
            try:
                encoder.following(answer.example or loop.run(_answered(answer, calls)), -1, tools=answer.tools)
            except UserError as error:
                raise UserError(f"{where}: {source}: {error}") from error
    finally:
        loop.close()


async def _answered(answer: EnvironmentAnswer, calls: Calls) -> Observation:
    try:
        environment = await calls.make(answer)
        try:
            check_begin(answer, environment, await calls.reset(environment, answer.row))
            return await calls.step(environment, "?")
        finally:
            await calls.close(environment)
    except EnvironmentFailed:
        return Observation()
