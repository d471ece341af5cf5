"""A fleet on a simulated clock, for `simulate_rollouts.py`: the collector's side of it is real, nothing is computed.

Each engine runs at most `running` responses at once, and admits as the real client does: what has begun first, the
longest first, then in the order of submission, a prompt's responses on one engine. With n at work a decode step takes
`step_s` + n x `response_s` seconds. Tokens that are read (a prompt, once a request, and what a continued response has
already) take `read_s` each, and the engine decodes nothing meanwhile. With `stragglers: keep` new weights make an
engine read all that is in flight again (`sync.in_flight: retract`).

A response's length follows from its seed, so it does not depend on when and by what it is sampled. One that was thrown
away and is sampled from its start again is another draw.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import NormalDist

import torch

from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams, VersionSpan

Answer = Future[list[Completion]]


class Lengths:
    """A distribution of lengths, by its quantiles: of a file's numbers, or lognormal; cut at the limit."""

    def __init__(self, limit: int, median: float, sigma: float, given: Sequence[int] = ()) -> None:
        self.limit = limit
        self._normal, self._given = NormalDist(math.log(median), sigma), sorted(given)
        drawn = [self.at((i + 0.5) / 20_000) for i in range(20_000)]
        self.mean = sum(drawn) / len(drawn)
        # Weighted by tokens: at some moment a response in progress has half of its length.
        self.in_progress = sum(length * length for length in drawn) / 2 / sum(drawn)

    def at(self, share: float) -> int:
        """The length that this share of responses does not exceed."""
        if self._given:
            length = self._given[int(share * len(self._given))]
        else:
            length = round(math.exp(self._normal.inv_cdf(share)))
        return max(1, min(self.limit, length))

    def of(self, seed: int, draw: int) -> int:
        """The response's length; `draw` counts how often it was thrown away."""
        share = random.Random(f"{seed} {draw}").random() if draw else seed / 2**63
        return self.at(min(max(share, 1e-12), 1 - 1e-12))


@dataclass(frozen=True, slots=True)
class World:
    """The workload and its rates: all but the collector's setting."""

    lengths: Lengths
    prompts: int
    responses: int
    engines: int
    running: int
    prompt: int
    step_s: float
    response_s: float
    read_s: float
    update_s: float


@dataclass(slots=True, eq=False)
class Asked:
    """A request, its answer, and what of it is not there yet."""

    request: GenerateRequest
    number: int
    answer: Answer = field(default_factory=Future)
    samples: list[Sample] = field(default_factory=list)
    found: dict[int, Completion] = field(default_factory=dict)
    homes: set[SimulatedEngine] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Sample:
    """A response of a request: tokens it has, tokens it lacks; `cuts` are versions that sampled up to so many."""

    whole: Asked
    index: int
    begun: int
    left: int
    engine: SimulatedEngine | None = None
    start: float = 0.0
    cuts: list[tuple[int, int]] = field(default_factory=list)


class SimulatedEngine:
    """Responses that decode in step. `tick` counts decode steps; `debt` is time to read before the next one."""

    def __init__(self, world: World) -> None:
        self.count, self.tick, self.debt, self.at = 0, 0.0, 0.0, 0.0
        self.heap: list[tuple[float, int, Sample]] = []
        self._world = world
        self._entries = 0

    def sync(self, now: float) -> None:
        """Decode until now."""
        read = min(self.debt, now - self.at)
        self.debt -= read
        self.tick += (now - self.at - read) / self._step()
        self.at = now

    def next(self) -> float:
        """The time at which the next response ends."""
        while self.heap and self.heap[0][2].engine is not self:
            heapq.heappop(self.heap)
        return self.at + self.debt + (self.heap[0][0] - self.tick) * self._step() if self.heap else math.inf

    def add(self, sample: Sample) -> None:
        """Begin a response, or go on with it; the engine is in sync."""
        first = self not in sample.whole.homes
        sample.whole.homes.add(self)
        self.debt += (sample.begun + (self._world.prompt if first else 0)) * self._world.read_s
        sample.engine, sample.start = self, self.tick
        self.count += 1
        self._entries += 1
        heapq.heappush(self.heap, (self.tick + sample.left, self._entries, sample))

    def pop(self, now: float) -> Sample:
        """Take the response that ends now."""
        end, _, sample = heapq.heappop(self.heap)
        self.at, self.debt, self.tick = now, 0.0, end
        self.count -= 1
        sample.engine = None
        return sample

    def read_again(self, version: int) -> None:
        """Compute the cache of all that is in flight by new weights; tokens so far are of `version`."""
        prompts = set()
        for _, _, sample in self.heap:
            if sample.engine is self:
                tokens = self.sampled(sample)
                sample.cuts.append((version, tokens))
                prompts.add(sample.whole)
                self.debt += (sample.begun + tokens) * self._world.read_s
        self.debt += len(prompts) * self._world.prompt * self._world.read_s

    def sampled(self, sample: Sample) -> int:
        """Tokens that a response in flight has grown by."""
        return min(sample.left, math.floor(self.tick - sample.start + 1e-6))

    def _step(self) -> float:
        return self._world.step_s + self.count * self._world.response_s


class SimulatedFleet:
    """The engines and their clock, as the collector sees them; `admitted` has each response's step and length."""

    def __init__(self, world: World) -> None:
        self.version, self.retried, self.step, self.now = 0, 0, 1, 0.0
        self.admitted: dict[int, tuple[int, int]] = {}
        self.read_s = 0.0
        self._world = world
        self._engines = [SimulatedEngine(world) for _ in range(world.engines)]
        self._queue: list[tuple[int, int, int, Sample]] = []
        self._asked: dict[Answer, Asked] = {}
        self._number = 0
        # Draws of a response, and whether the last has a token.
        self._draws: dict[int, int] = {}
        self._touched: set[int] = set()
        # All tensors of responses are slices of it.
        self._tokens = torch.zeros(world.lengths.limit, dtype=torch.int8)

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Answer:
        """Queue a request."""
        asked, self._number = Asked(request, self._number), self._number + 1
        begun = [len(tokens) for tokens in request.begun] or [0] * len(request.seeds)
        for index, (seed, tokens) in enumerate(zip(request.seeds, begun, strict=True)):
            if not tokens and seed in self._touched:
                self._draws[seed] += 1
                self._touched.discard(seed)
            whole = self._world.lengths.of(seed, self._draws.setdefault(seed, 0))
            self.admitted.setdefault(seed, (self.step, whole))
            sample = Sample(asked, index, tokens, whole - tokens)
            asked.samples.append(sample)
            heapq.heappush(self._queue, (-tokens, asked.number, index, sample))
        self._asked[asked.answer] = asked
        self._admit()
        return asked.answer

    def abort(self, answers: Sequence[Answer]) -> None:
        """End requests where they are."""
        for engine in self._engines:
            engine.sync(self.now)
        for asked in [self._asked[answer] for answer in answers if answer in self._asked]:
            for sample in asked.samples:
                if sample.index not in asked.found:
                    at, tokens = sample.engine, 0
                    if at is not None:
                        tokens, sample.engine = at.sampled(sample), None
                        at.count -= 1
                    self._end(sample, tokens)
        ended = {id(sample) for _, _, _, sample in self._queue if sample.index in sample.whole.found}
        self._queue = [entry for entry in self._queue if id(entry[3]) not in ended]
        heapq.heapify(self._queue)
        self._admit()

    def wait(self, answers: Sequence[Answer]) -> None:
        """Let the clock go on until one of these is there."""
        while not any(answer.done() for answer in answers):
            before = len(self._asked)
            while len(self._asked) == before:
                self._event()

    def go_on(self, seconds: float) -> None:
        """Let the clock go on: the policy learns."""
        until = self.now + seconds
        while min(engine.next() for engine in self._engines) <= until:
            self._event()
        self.now = until
        for engine in self._engines:
            engine.sync(until)

    def push(self, version: int) -> None:
        """Take new weights."""
        for engine in self._engines:
            engine.read_again(self.version)
        self.version = version

    def take_retried(self) -> list[int]:
        """Nothing is ever lost."""
        return []

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """Not what the collector uses."""
        raise NotImplementedError

    def healthy(self) -> bool:
        """Always."""
        return True

    def close(self) -> None:
        """Nothing to close."""

    def _event(self) -> None:
        engine = min(self._engines, key=SimulatedEngine.next)
        self.now = engine.next()
        assert self.now < math.inf, "nothing is in flight, and the collector waits"
        sample = engine.pop(self.now)
        self._end(sample, sample.left)
        self._admit()

    def _admit(self) -> None:
        most = self._world.running
        while self._queue:
            sample = self._queue[0][3]
            free = [engine for engine in self._engines if engine.count < most]
            if not free:
                return
            homes = [engine for engine in free if engine in sample.whole.homes]
            engine = min(homes or free, key=lambda engine: engine.count)
            heapq.heappop(self._queue)
            engine.sync(self.now)
            engine.add(sample)

    def _end(self, sample: Sample, tokens: int) -> None:
        asked, seed = sample.whole, sample.whole.request.seeds[sample.index]
        if tokens:
            self._touched.add(seed)
        slice_T, start, spans = self._tokens[:tokens], 0, []
        for version, end in [*sample.cuts, (self.version, tokens)]:
            if end > start:
                spans.append(VersionSpan(version, start, end))
                start = end
        reason = FinishReason.STOP if tokens == sample.left else FinishReason.ABORT
        asked.found[sample.index] = Completion(slice_T, slice_T, slice_T, None, tuple(spans), reason, seed)
        if len(asked.found) == len(asked.samples):
            del self._asked[asked.answer]
            asked.answer.set_result([asked.found[index] for index in range(len(asked.samples))])
