"""One response with its environment: turns of the policy, which an engine samples, and the environment's answers.

An `EpisodeRun` does not sample. It says what to sample next (`request`), takes what was sampled (`take`) and has it
answered (`answer`), until it is `done`; its `completion` then has all new tokens, the environment's among them. A
response that was begun earlier goes on where it stands: its environment is made again, and hears the actions of the
turns that are over.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megasharp.common.errors import NotSampled, UserError
from megasharp.common.records import (
    Completion,
    Episode,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Turn,
    Verdict,
)
from megasharp.config.rollout import EpisodesConfig
from megasharp.rollout.episodes.environment_calls import Calls, EnvironmentFailed
from megasharp.rollout.episodes.observation_tokens import ObservationTokens
from megasharp.rollout.in_flight import join
from megasharp.tasks.environment import Environment, EnvironmentAnswer, Observation, verdict_of


def check_begin(answer: EnvironmentAnswer, environment: Environment, first: Observation) -> None:
    """Raise UserError where an environment begins with another observation than the prompt that the policy reads."""
    if not answer.begins_with(first):
        raise UserError(
            f"the environment {type(environment).__name__} begins otherwise than when its problems were read: the row "
            f"{answer.row} is now {first.text or [*first.messages]!r}; take its random numbers from the row"
        )


class EpisodeRun:
    """Response `index` of a request, from what is begun of it to its end. `calls` calls its environment."""

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        sampling: SamplingParams,
        encoder: ObservationTokens,
        limits: EpisodesConfig,
        calls: Calls,
    ) -> None:
        assert isinstance(request.episode, EnvironmentAnswer)
        self.done = False
        self._answer = request.episode
        self._seed = request.seeds[index]
        self._sampling = request.under(sampling)
        self._encoder, self._limits, self._calls = encoder, limits, calls
        self._prompt = request.tokens
        self._begun = request.begun[index] if request.begun else ()
        self._turns = list(request.begun_turns[index]) if request.begun_turns else []
        self._tokens = [*self._begun]
        self._environment: Environment | None = None
        self._last = Observation()
        self._new: Completion | None = None
        self._finish, self._cause = FinishReason.ABORT, ""
        self._failure, self._cut = "", False
        self._verdict: Verdict | None = None

    async def begin(self) -> None:
        """Make the environment, and bring it to where the response stands.

        Raises UserError where it does not answer as it did before.
        """
        try:
            self._environment = await self._calls.make(self._answer)
            self._last = await self._calls.reset(self._environment, self._answer.row)
            check_begin(self._answer, self._environment, self._last)
            for turn in self._turns:
                await self._replay(turn)
        except EnvironmentFailed as error:
            self._fail(error)
            return
        tail = self._tail
        if tail and tail[-1] in self._sampling.stop_token_ids:
            await self._step()
        else:
            self._check_room()

    @property
    def request(self) -> GenerateRequest:
        """The request for the next tokens of the policy."""
        most, limit = self._sampling.max_tokens, self._limits.turn_tokens
        if limit is not None:
            most = min(most, len(self._tokens) - len(self._tail) + limit)
        begun = (tuple(self._tokens),) if self._tokens else ()
        return GenerateRequest(self._prompt, (self._seed,), begun, max_tokens=most, episode=self._answer)

    def take(self, part: Completion) -> None:
        """Take what was sampled. A turn that was cut short is no action, and ends the response."""
        self._append(part)
        if part.finish_reason is not FinishReason.STOP:
            self._end(part.finish_reason, part.cause)

    async def answer(self) -> None:
        """Let the environment answer the turn that was taken."""
        if not self.done:
            await self._step()

    def give_up(self, error: NotSampled) -> NotSampled | None:
        """End where no engine samples the next turn; return the error where there is no token yet."""
        self._end(FinishReason.ABORT, str(error))
        return None if self._tokens else error

    @property
    def completion(self) -> Completion:
        """The new tokens, and the episode of the whole response; aborted where it is not done."""
        new = self._new or Completion.unsampled(self._seed, self._sampling)
        episode = Episode(tuple(self._turns), self._verdict, self._cut, self._failure)
        return replace(new, finish_reason=self._finish, cause=self._cause, episode=episode)

    async def close(self) -> None:
        """Close the environment. A failure here fails the response, so that it is reported."""
        if self._environment is None:
            return
        environment, self._environment = self._environment, None
        try:
            await self._calls.close(environment)
        except EnvironmentFailed as error:
            self._fail(error)

    @property
    def _tail(self) -> list[int]:
        """The policy's tokens since the environment's last answer."""
        return self._tokens[self._turns[-1].until if self._turns else 0 :]

    async def _step(self) -> None:
        start = self._turns[-1].until if self._turns else 0
        end = len(self._tokens)
        assert self._environment is not None
        try:
            self._last = await self._calls.step(self._environment, self._action(start, end))
        except EnvironmentFailed as error:
            self._fail(error)
            return
        self._turns.append(Turn(start, end, end, self._last.reward))
        if self._last.done:
            self._verdict = verdict_of(self._last, self._reward)
            self._end(FinishReason.STOP)
        else:
            self._answered()

    def _answered(self) -> None:
        """Put the last observation behind the last turn, where it has room before further tokens of the policy."""
        turn = self._turns[-1]
        if len(self._turns) >= self._limits.max_turns:
            self._cut = True
            self._end(FinishReason.LENGTH)
            return
        said = self._following(self._tokens[turn.end - 1])
        if turn.end + len(said) >= self._sampling.max_tokens:
            self._end(FinishReason.LENGTH)
            return
        self._turns[-1] = replace(turn, until=turn.end + len(said))
        if said:
            self._append(self._observed(said))

    async def _replay(self, turn: Turn) -> None:
        assert self._environment is not None
        self._last = await self._calls.step(self._environment, self._action(turn.start, turn.end))
        before = self._begun[turn.end : turn.until]
        if self._last.done and not self._repeats:
            raise EnvironmentFailed(f"{type(self._environment).__name__} ends earlier than before")
        cut = turn is self._turns[-1] and turn.until == turn.end == len(self._begun)
        said = before if cut or not self._repeats else self._following(self._begun[turn.end - 1])
        ended = " and the end" if self._last.done else ""
        if ended or (self._repeats and self._last.reward != turn.reward) or tuple(said) != tuple(before):
            name = type(self._environment).__name__
            raise UserError(
                f"the environment {name} answers otherwise than before: the same row and actions gave reward "
                f"{turn.reward:g} and {self._encoder.action(before)!r}, now {self._last.reward:g} and "
                f"{self._encoder.action(said)!r}{ended}; take its random numbers from the row"
            )

    def _check_room(self) -> None:
        if self._turns and self._turns[-1].until == self._turns[-1].end == len(self._tokens):
            self._answered()
        elif len(self._tokens) >= self._sampling.max_tokens:
            self._end(FinishReason.LENGTH)

    @property
    def _repeats(self) -> bool:
        # A user's class need not be an Environment.
        return bool(getattr(self._environment, "repeats", True))

    def _following(self, last: int) -> tuple[int, ...]:
        """Return the tokens of the last observation behind the policy's token `last`."""
        return self._encoder.following(self._last, last, self._sampling.stop_token_ids, self._answer.tools)

    def _action(self, start: int, end: int) -> str:
        return self._sampling.text(self._encoder.action(self._tokens[start:end]))

    @property
    def _reward(self) -> float:
        return sum(turn.reward for turn in self._turns)

    def _end(self, finish: FinishReason, cause: str = "") -> None:
        self.done = True
        self._finish, self._cause = finish, cause
        if finish is FinishReason.LENGTH:
            self._verdict = verdict_of(replace(self._last, info={"correct": False, **self._last.info}), self._reward)

    def _fail(self, error: EnvironmentFailed) -> None:
        self._verdict, self._failure = None, str(error)
        self._end(FinishReason.ABORT, str(error))

    def _append(self, part: Completion) -> None:
        self._tokens += part.tokens.tolist()
        self._new = part if self._new is None else join(self._new, part)

    def _observed(self, tokens: tuple[int, ...]) -> Completion:
        """Return the environment's tokens as a part of the response: zeros where the policy's tokens have numbers.

        Experts they have none yet: the engine that samples the next turn reads them.
        """
        new = self._new or Completion.unsampled(self._seed, self._sampling)
        count = len(tokens)

        def zeros(like_T: Tensor | None) -> Tensor | None:
            return None if like_T is None else like_T.new_zeros((count, *like_T.shape[1:]))

        return replace(
            new,
            tokens=torch.tensor(tokens, dtype=torch.int64),
            sampler_logp=torch.zeros(count),
            policy_logp=torch.zeros(count),
            memory_logp=zeros(new.memory_logp),
            version_spans=(),
            argmax_moved=zeros(new.argmax_moved),
            calibration_kl=zeros(new.calibration_kl),
            entropy=zeros(new.entropy),
            top_logp=zeros(new.top_logp),
            experts=torch.empty(0, dtype=torch.uint8),
        )
