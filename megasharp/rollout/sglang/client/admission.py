"""Admission: what an engine is given at once, and which engine gets a response. No I/O, and no clock.

The unit is one response. An engine gets what it can run, by its cache and its own bound on requests, and a small queue,
so that it never waits for us; all else waits here, where it can still go to another engine and no time limit runs.

A response is charged the tokens that it is expected to have at its end: a running one holds as many as that on average
where lengths are distributed exponentially, because long responses are met running more often. Its prompt is charged
once for all of its responses on an engine, which share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

from megasharp.common.records import GenerateRequest, SamplingParams
from megasharp.config.rollout import RolloutConfig
from megasharp.rollout.sglang.client.api import Limits, Room

# Responses that an engine gets beyond what it can run.
_QUEUE_SHARE = 0.1
_QUEUE_LEAST = 2
# An engine with this much of a full one's load is clearly less loaded: worth computing a prompt once more.
_CLEARLY_LESS = 0.75
# Weight, in responses, of the assumption that a response has half of its limit.
_ASSUMED = 16
# Older lengths count half from so many responses on: the policy changes.
_REMEMBERED = 1024
_PROMPTS = 131_072
_LEAST_FIRST_TOKEN_S = 600.0


def limits_of(rollout: RolloutConfig) -> Limits:
    """The time limits of a response in an engine.

    Every running response ends within `request_limit_s` of its first token, and fewer wait than run. So a first token
    that takes longer than that never comes, unless weights are on their way: hence the ten minutes.
    """
    planned = max(rollout.request_limit_s, _LEAST_FIRST_TOKEN_S)
    return Limits(rollout.first_token_limit_s or planned, rollout.request_limit_s)


class Lengths:
    """Response lengths as they are expected, learnt from those that came back whole."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._responses = 0.0
        self._of_prompt: dict[int, float] = {}

    def note(self, request: GenerateRequest, length: int) -> None:
        """A response had so many tokens, those that were begun earlier included."""
        if self._responses >= _REMEMBERED:
            self._tokens, self._responses = self._tokens / 2, self._responses / 2
        self._tokens += length
        self._responses += 1
        key = hash(request.tokens)
        before = self._of_prompt.pop(key, float(length))
        self._of_prompt[key] = 0.75 * before + 0.25 * length
        if len(self._of_prompt) > _PROMPTS:
            del self._of_prompt[next(iter(self._of_prompt))]

    def known(self, request: GenerateRequest) -> float | None:
        """The length of the prompt's earlier responses, the latest counting most; None where there were none."""
        return self._of_prompt.get(hash(request.tokens))

    def expected(self, request: GenerateRequest, begun: int, sampling: SamplingParams) -> float:
        """Tokens that a response will have, of which `begun` are there: as many more as a fresh one is expected to."""
        most = sampling.max_tokens
        mean = (_ASSUMED * most / 2 + self._tokens) / (_ASSUMED + self._responses)
        return min(begun + (self.known(request) or mean), max(most, begun))


class Load:
    """The samples that one engine was given and has not answered. A `closed` engine gets nothing.

    `turn` is the number, among all engines' samples, of the one that it got last.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self.turn = 0
        self.responses = 0
        self.tokens = 0.0
        self.closed = False
        self._of_prompt: dict[Hashable, int] = {}

    @property
    def share(self) -> float:
        """Part of the room that is taken."""
        return max(self.responses / self.room.responses, self.tokens / self.room.tokens)

    def takes(self, prompt: Hashable, length: int, expected: float) -> bool:
        """Return True where a response may come, whose prompt of `length` tokens is known by `prompt`."""
        most, least = self.bounds()
        cost = self._cost(prompt, length, expected)
        return cost <= most or cost >= least

    def bounds(self) -> tuple[float, float]:
        """Return two costs in tokens, of prompt and response: it takes what costs no more than the one, or no less than
        the other. The queue has a share of the room, and always place for two responses, however long.
        """
        nothing = -math.inf, math.inf
        if self.closed:
            return nothing
        if not self.responses:
            return math.inf, -math.inf
        queue = max(_QUEUE_LEAST, math.ceil(_QUEUE_SHARE * self.room.responses))
        if self.responses >= self.room.responses + queue:
            return nothing
        over = self.tokens - self.room.tokens
        return _QUEUE_SHARE * self.room.tokens - over, over / (_QUEUE_LEAST - 1)

    def add(self, prompt: Hashable, length: int, expected: float) -> None:
        """A response is sent to the engine."""
        self.tokens += self._cost(prompt, length, expected)
        self.responses += 1
        self._of_prompt[prompt] = self._of_prompt.get(prompt, 0) + 1

    def remove(self, prompt: Hashable, length: int, expected: float) -> None:
        """A response that was added is answered, or given up."""
        self.responses -= 1
        self._of_prompt[prompt] -= 1
        if not self._of_prompt[prompt]:
            del self._of_prompt[prompt]
        self.tokens -= self._cost(prompt, length, expected)

    def _cost(self, prompt: Hashable, length: int, expected: float) -> float:
        return expected if prompt in self._of_prompt else length + expected


def bounds(loads: Iterable[Load]) -> tuple[float, float]:
    """Return the widest `Load.bounds`: no engine takes what costs more than the one and less than the other."""
    of_each = [load.bounds() for load in loads]
    return max(most for most, _ in of_each), min(least for _, least in of_each)


def choose(loads: Sequence[Load], homes: Collection[Load], takes: Callable[[Load], bool]) -> Load | None:
    """The engine for a response, or None where it is to wait; `homes` have its prompt's cache.

    A home comes first. Where each is full, another engine does only if it is clearly less loaded. Engines that are
    equally loaded take turns.
    """
    free = [load for load in loads if takes(load)]
    at_home = [load for load in loads if load in homes]
    if at_home:
        most = _CLEARLY_LESS * min(load.share for load in at_home)
        free = [load for load in free if load in homes] or [load for load in free if load.share <= most]
    return min(free, key=lambda load: (load.share, load.turn), default=None)
