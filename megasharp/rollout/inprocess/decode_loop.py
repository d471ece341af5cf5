"""The decode loop: draw a token for each row, give the rows that ended to the samples that wait, step.

The loop is open: samples may be added at any time, and each is handed out in the step in which it ends. A batch has as
many rows as may be sampled at once. The sample that ends gives its row to the next one in the step that follows, so
that rows are idle only while none waits; then the batch gets smaller. As long as all limits were `SHORT` the next ones
begin together, once all have ended. A prompt is read once for the samples that wait for it together, a little before
the first of them has a row, and is freed after their last.

The loop knows a model by `Model` and a cache by `Cache`, and passes logits on without looking inside; so only the model
and `draw` know of a memory network beside the policy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megasharp.common.records import SamplingParams
from megasharp.ops.uniform import seeds_to_int64
from megasharp.rollout.inprocess.cache import moved_up
from megasharp.rollout.inprocess.draw_log import DrawLog
from megasharp.rollout.inprocess.generation import Draw, Logits, draw
from megasharp.rollout.inprocess.stop_strings import StopStrings

# Of the rows, how many may wait for theirs with a prompt that is read: several prompts are read faster together.
READ_AHEAD = 1 / 8
# Tokens up to which rows begin together. Rows of one age read half as many slots on average and need no mask: for
# lengths of 12 to 20 refilling took a quarter more time, for lognormal ones (sigma 1, median 64) half as much.
SHORT = 32


class RowCache(Protocol):
    """A cache of prompts and rows; `Caches` and `KeyValueCache` say more."""

    def extend(self, prompts: Sequence[int]) -> None:
        """Begin more rows behind those that there are, one for each of these prompts."""
        ...

    def restart(self, rows: Sequence[int], prompts: Sequence[int]) -> None:
        """Begin these rows again, for these prompts."""
        ...

    def keep(self, order: Sequence[int]) -> None:
        """Row `i` becomes what row `order[i]` was; the others are dropped."""
        ...

    def keep_prompts(self, order: Sequence[int]) -> None:
        """Prompt `i` becomes what prompt `order[i]` was; the others are freed."""
        ...


Cache = TypeVar("Cache", bound=RowCache)


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """The logits after each of B prompts, and where the policy sent its tokens.

    `experts`: for each prompt [prompt, layers, per_token]; None where nobody records them.
    """

    logits: Logits
    experts: Sequence[Tensor] | None = None


class Model(Protocol[Cache]):
    """Anything that turns tokens into next-token logits against a cache."""

    @property
    def device(self) -> torch.device:
        """Where logits and caches live."""
        ...

    def new_cache(self) -> Cache:
        """Return a cache without prompts and rows."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]], cache: Cache) -> Read:
        """Put prompts behind those of the cache, and read them."""
        ...

    def step(self, tokens_S: Tensor, cache: Cache) -> Logits:
        """Logits after one more token per row."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """A response to draw, of at most `limit` tokens; samples begin in the order of their numbers.

    The first `begun` of these tokens were drawn before, and stand at the end of its prompt.
    """

    number: int
    seed: int
    limit: int
    begun: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """Samples that ended in one step, by number, and all their tokens, one sample behind the other, on the CPU.

    `drawn` holds [T] wherever a `Draw` of one step holds [S]; the samples have `lengths` of them, and `stopped` is true
    where the last one is a stop token, or its text holds a stop string. `prompt_experts` are those of each sample's
    prompt but for its last token, with which `drawn` begins; None where nobody records them.
    """

    samples: list[Sample]
    drawn: Draw
    lengths: list[int]
    stopped: list[bool]
    prompt_experts: list[Tensor | None]


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt of samples that were added together: so many have not begun, and so many not ended.

    `place` is its place in the cache, and `first` are the logits after it, once it is read and until its last sample
    begins. `experts`, on the CPU, are those of its tokens but the last, whose are in `first`.
    """

    tokens: tuple[int, ...]
    waiting: int = 0
    unfinished: int = 0
    place: int = -1
    first: Logits | None = None
    experts: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Row:
    """A sample on its way, and the step of its first token."""

    sample: Sample
    prompt: _Prompt
    start: int = -1


def row_count(live: int) -> int:
    """The rows that are computed for so many live ones, at most an eighth or four more.

    Not any number: oneDNN prepares a product's shape for half a millisecond when it is new.
    """
    step = max(4, 1 << max(0, live.bit_length() - 4))
    return -(-live // step) * step


class DecodeLoop(Generic[Cache]):
    """Draws samples with one kind of sampling.

    Limits of tokens are the samples' own, not that of `sampling`; stop strings are `strings`'.
    """

    def __init__(
        self, model: Model[Cache], sampling: SamplingParams, most_rows: int, strings: StopStrings | None = None
    ) -> None:
        self._model, self._sampling, self._strings = model, sampling, strings
        self._ahead = max(1, int(most_rows * READ_AHEAD))
        self._refills = False
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=model.device)
        self._cache = model.new_cache()
        self._waiting: deque[_Row] = deque()
        # Those that samples wait for, by their tokens; and those in the cache, by place.
        self._awaited: dict[tuple[int, ...], _Prompt] = {}
        self._read: list[_Prompt] = []
        # None where a sample has ended and none took its row.
        self._rows: list[_Row | None] = []
        self._logits: Logits | None = None
        self._seeds_S = torch.empty(0, dtype=torch.int64, device=model.device)
        self._limits_S = torch.empty_like(self._seeds_S)
        self._positions_S = torch.empty_like(self._seeds_S)
        self._log = DrawLog()
        # Samples that have rows, and whether some ended since prompts were freed.
        self.live = 0
        self._ended_some = False

    def add(self, tokens: tuple[int, ...], samples: Sequence[Sample]) -> None:
        """Let samples of one prompt wait for rows."""
        prompt = self._awaited.setdefault(tokens, _Prompt(tokens))
        prompt.waiting += len(samples)
        prompt.unfinished += len(samples)
        self._waiting.extend(_Row(sample, prompt) for sample in samples)
        self._refills = self._refills or any(sample.limit > SHORT for sample in samples)

    @property
    def empty(self) -> bool:
        """Return whether no sample has a row or waits."""
        return not self.live and not self._waiting

    @property
    def next(self) -> float:
        """The number of the sample that begins next; infinity where none waits."""
        return self._waiting[0].sample.number if self._waiting else math.inf

    def begin(self, most_rows: int, before: float = math.inf) -> bool:
        """Give rows to samples that wait while fewer than `most_rows` have some; return whether any has begun.

        Only samples with numbers below `before` begin.
        """
        if not self._waiting and not self._ended_some:
            return False
        room = most_rows - self.live if self._refills or not self.live else 0
        rows = [row for row in islice(self._waiting, max(0, room)) if row.sample.number < before]
        if rows:
            self._read_prompts(rows)
            # Idle rows first.
            again = self._idle()[: len(rows)]
            self._restart(again, rows[: len(again)])
            self._extend(rows[len(again) :])
            self.live += len(rows)
            self._have_begun(rows)
        if self._ended_some:
            self._free_prompts()
        return bool(rows)

    def advance(self) -> Ended | None:
        """Draw a token in each row, and step; returns the samples that ended."""
        if self._logits is None or not self._rows:
            return None
        if self._log.full:
            self._log.make_room(min(row.start for row in self._rows if row is not None))
        drawn = draw(self._logits, self._seeds_S, self._positions_S, self._sampling)
        self._log.add(drawn)
        self._positions_S += 1
        ended_S = torch.isin(drawn.tokens_S, self._stops) | (self._positions_S >= self._limits_S)
        if self._strings is not None:
            numbers = [-1 if row is None else row.sample.number for row in self._rows]
            ended_S |= torch.tensor(self._strings.add(numbers, drawn.tokens_S.tolist()), device=ended_S.device)
        ended = ended_S.nonzero().squeeze(1).tolist()
        rows = [(place, row) for place in ended if (row := self._rows[place]) is not None]
        if not rows:
            self._logits = self._model.step(drawn.tokens_S, self._cache)
            return None
        found = self._ended(rows)
        self._drop_rows([place for place, _ in rows], drawn.tokens_S)
        return found

    def _ended(self, rows: Sequence[tuple[int, _Row]]) -> Ended:
        rows = sorted(rows, key=lambda row: row[1].sample.number)
        drawn, lengths = self._log.of([place for place, _ in rows], [row.start for _, row in rows])
        last = drawn.tokens_S[torch.tensor(lengths).cumsum(0) - 1]
        stopped = [token in self._sampling.stop_token_ids for token in last.tolist()]
        for number, (_, row) in enumerate(rows):
            row.prompt.unfinished -= 1
            if self._strings is not None:
                stopped[number] |= self._strings.taken(row.sample.number)
        experts = [row.prompt.experts for _, row in rows]
        return Ended([row.sample for _, row in rows], drawn, lengths, stopped, experts)

    def _drop_rows(self, ended: list[int], tokens_S: Tensor) -> None:
        """Take a step with the rows that go on, and with few others: `tokens_S` were drawn for all."""
        assert self._logits is not None
        for place in ended:
            self._rows[place] = None
        self.live -= len(ended)
        self._ended_some = True
        if (rows := row_count(self.live)) < len(self._rows):
            idle = self._idle()
            order = moved_up(len(self._rows), idle[: len(self._rows) - rows])
            kept = torch.tensor(order, dtype=torch.int64, device=self._model.device)
            self._cache.keep(order)
            self._log.keep(kept)
            self._rows = [self._rows[place] for place in order]
            self._seeds_S, self._limits_S, self._positions_S = (
                values.index_select(0, kept) for values in (self._seeds_S, self._limits_S, self._positions_S)
            )
            tokens_S, self._logits = tokens_S.index_select(0, kept), self._logits.select(kept)
        if self.live:
            self._logits = self._model.step(tokens_S, self._cache)

    def _idle(self) -> list[int]:
        return [place for place, row in enumerate(self._rows) if row is None]

    def _have_begun(self, rows: Sequence[_Row]) -> None:
        for row in rows:
            self._waiting.popleft()
            row.start = self._log.steps
            row.prompt.waiting -= 1
            if not row.prompt.waiting:
                row.prompt.first = None
                del self._awaited[row.prompt.tokens]

    def _restart(self, places: list[int], rows: list[_Row]) -> None:
        if not rows:
            return
        assert self._logits is not None
        chosen = torch.tensor(places, dtype=torch.int64, device=self._model.device)
        self._cache.restart(places, [row.prompt.place for row in rows])
        self._logits.put(chosen, joined([_first(row) for row in rows]))
        self._seeds_S[chosen], self._limits_S[chosen], self._positions_S[chosen] = self._numbers(rows)
        for place, row in zip(places, rows, strict=True):
            self._rows[place] = row

    def _extend(self, rows: list[_Row]) -> None:
        """Put rows behind those that there are."""
        if not rows:
            return
        self._cache.extend([row.prompt.place for row in rows])
        first = [_first(row) for row in rows]
        self._logits = joined([self._logits, *first] if self._logits is not None else first)
        before = (self._seeds_S, self._limits_S, self._positions_S)
        self._seeds_S, self._limits_S, self._positions_S = map(torch.cat, zip(before, self._numbers(rows), strict=True))
        self._rows += rows

    def _numbers(self, rows: list[_Row]) -> tuple[Tensor, Tensor, Tensor]:
        """Seeds, limits, and the positions of the next tokens."""
        seeds = seeds_to_int64([row.sample.seed for row in rows], self._model.device)
        counts = [[row.sample.limit for row in rows], [row.sample.begun for row in rows]]
        limits, positions = torch.tensor(counts, dtype=torch.int64, device=self._model.device)
        return seeds, limits, positions

    def _read_prompts(self, rows: Sequence[_Row]) -> None:
        """Read the prompts of samples that begin, where they are not, and with them some that follow."""
        if all(row.prompt.first is not None for row in rows):
            return
        ahead = self._ahead if self._refills and self._log.steps else 0
        wanted = dict.fromkeys(row.prompt for row in islice(self._waiting, len(rows) + ahead))
        new = [prompt for prompt in wanted if prompt.first is None]
        read = self._model.prefill([prompt.tokens for prompt in new], self._cache)
        for number, prompt in enumerate(new):
            prompt.place, prompt.first = len(self._read), read.logits.block(number, number + 1)
            if read.experts is not None:
                prompt.experts = read.experts[number][:-1].cpu()
            self._read.append(prompt)

    def _free_prompts(self) -> None:
        self._ended_some = False
        order = moved_up(len(self._read), [place for place, each in enumerate(self._read) if not each.unfinished])
        if not order:
            self._cache = self._model.new_cache()
        elif len(order) < len(self._read):
            self._cache.keep_prompts(order)
        self._read = [self._read[place] for place in order]
        for place, prompt in enumerate(self._read):
            prompt.place = place


def _first(row: _Row) -> Logits:
    assert row.prompt.first is not None, "read before the sample begins"
    return row.prompt.first


def joined(parts: Sequence[Logits]) -> Logits:
    """One row after another."""
    memory = [part.memory_SV for part in parts if part.memory_SV is not None]
    experts = [part.experts_SLK for part in parts if part.experts_SLK is not None]
    return Logits(
        torch.cat([part.policy_SV for part in parts]),
        torch.cat(memory) if memory else None,
        torch.cat(experts) if experts else None,
    )
