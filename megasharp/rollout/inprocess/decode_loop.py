"""The decode loop: draw a token for each row, give the rows that ended to the samples that wait, step.

A batch has as many rows as may be sampled at once. The sample that ends gives its row to the next one in the step that
follows, so that rows are idle only once none waits; then the batch gets smaller. Where all limits are `SHORT` the next
ones begin together, once all have ended. A prompt is read once, a little before its first sample has a row, and is
freed after its last.

The loop knows a model by `Model` and a cache by `Cache`, and passes logits on without looking inside; so only the model
and `draw` know of a memory network beside the policy.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megasharp.common.records import SamplingParams
from megasharp.ops.uniform import seeds_to_int64
from megasharp.rollout.inprocess.cache import moved_up
from megasharp.rollout.inprocess.generation import Draw, Logits, draw, join

# Of the rows, how many may wait for theirs with a prompt that is read: several prompts are read faster together.
READ_AHEAD = 1 / 8
# Tokens up to which rows begin together. Rows of one age read half as many slots on average and need no mask: for
# lengths of 12 to 20 refilling took a quarter more time, for lognormal ones (sigma 1, median 64) half as much.
SHORT = 32


Decode = Callable[[Sequence[Sequence[int]]], Sequence[str]]


class StopStrings:
    """Finds the samples whose text has come to one of some strings.

    A string of so many bytes is in the text of at most as many tokens, whatever the tokenizer. A few more are decoded
    before them, because a decoder may drop a space that begins a text, or need several tokens for a character.
    """

    _CONTEXT = 4

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = strings
        self._decode = decode
        self._window = self._CONTEXT + max(len(string.encode()) for string in strings)
        self._tails: dict[int, deque[int]] = {}
        self.found: set[int] = set()

    def add(self, samples: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Add each sample's next token, -1 for nobody's; return whether its text holds a string now."""
        live = [(sample, token) for sample, token in zip(samples, tokens, strict=True) if sample >= 0]
        for sample, token in live:
            self._tails.setdefault(sample, deque(maxlen=self._window)).append(token)
        texts = self._decode([[*self._tails[sample]] for sample, _ in live])
        held = [any(string in text for string in self._strings) for text in texts]
        self.found |= {sample for (sample, _), is_held in zip(live, held, strict=True) if is_held}
        return [sample in self.found for sample in samples]

    def forget(self, sample: int) -> None:
        """Drop what is kept of a sample that has ended."""
        self._tails.pop(sample, None)


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


class Model(Protocol[Cache]):
    """Anything that turns tokens into next-token logits against a cache."""

    @property
    def device(self) -> torch.device:
        """Where logits and caches live."""
        ...

    def new_cache(self) -> Cache:
        """Return a cache without prompts and rows."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]], cache: Cache) -> Logits:
        """Put prompts behind those of the cache; returns the logits after each."""
        ...

    def step(self, tokens_S: Tensor, cache: Cache) -> Logits:
        """Logits after one more token per row."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """A response to draw: to prompt number `prompt`, of at most `limit` tokens."""

    prompt: int
    seed: int
    limit: int


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """All drawn tokens, one sample after another: `drawn` holds [T] wherever a `Draw` of one step holds [S].

    Sample `s` has `lengths[s]` of them; `stopped[s]` is true where the last one is a stop token, or its text holds a
    stop string.
    """

    drawn: Draw
    lengths: list[int]
    stopped: list[bool]


def sample_all(
    model: Model[Cache],
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    sampling: SamplingParams,
    most_rows: int,
    strings: StopStrings | None = None,
) -> Samples:
    """Draw `samples`, at least one, in their order, at most `most_rows` at once; those of a prompt follow each other.

    Limits of tokens are the samples' own, not that of `sampling`; stop strings are `strings`'. Tensors are on the CPU.
    """
    return _Loop(model, prompts, samples, sampling, most_rows, strings).run()


def row_count(live: int) -> int:
    """The rows that are computed for so many live ones, at most an eighth or four more.

    Not any number: oneDNN prepares a product's shape for half a millisecond when it is new.
    """
    step = max(4, 1 << max(0, live.bit_length() - 4))
    return -(-live // step) * step


class _Loop(Generic[Cache]):
    """Rows by number: the sample of each in `_sample_S`, -1 where it has ended and none waits."""

    def __init__(
        self,
        model: Model[Cache],
        prompts: Sequence[Sequence[int]],
        samples: Sequence[Sample],
        sampling: SamplingParams,
        most_rows: int,
        strings: StopStrings | None = None,
    ) -> None:
        self._strings = strings
        self._model, self._prompts, self._samples, self._sampling = model, prompts, samples, sampling
        self._most_rows, self._ahead = most_rows, max(1, int(most_rows * READ_AHEAD))
        self._refills = max(sample.limit for sample in samples) > SHORT
        self._unfinished = Counter(sample.prompt for sample in samples)
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=model.device)
        self._seeds = seeds_to_int64([sample.seed for sample in samples], model.device)
        self._limits = torch.tensor([sample.limit for sample in samples], device=model.device)
        self._cache = model.new_cache()
        # The prompts in the cache by place, and the logits after those that samples still wait for.
        self._places: list[int] = []
        self._first: dict[int, Logits] = {}
        self._next = min(most_rows, len(samples))
        self._log = _Log()
        self._rows: list[int] = []
        self._occupy(list(range(self._next)))
        self._positions_S = torch.zeros_like(self._seeds_S)

    def run(self) -> Samples:
        """Draw every sample."""
        logits = self._begin()
        while True:
            drawn = draw(logits, self._seeds_S, self._positions_S, self._sampling)
            self._log.add(drawn, self._sample_S)
            self._positions_S += 1
            ended_S = torch.isin(drawn.tokens_S, self._stops) | (self._positions_S >= self._limits_S)
            if self._strings is not None:
                at_string = self._strings.add(self._rows, drawn.tokens_S.tolist())
                ended_S |= torch.tensor(at_string, device=ended_S.device)
            ended = ended_S.nonzero().squeeze(1).tolist()
            ended = [row for row in ended if self._rows[row] >= 0]
            if not ended:
                logits = self._model.step(drawn.tokens_S, self._cache)
                continue
            found = self._after(ended, drawn.tokens_S, logits)
            if found is None:
                return self._log.samples(
                    len(self._samples), self._stops.cpu(), self._strings.found if self._strings else ()
                )
            logits = found

    def _begin(self) -> Logits:
        """The logits of the first rows."""
        numbers = list(dict.fromkeys(self._samples[number].prompt for number in range(self._next)))
        logits = self._model.prefill([self._prompts[number] for number in numbers], self._cache)
        self._places = numbers
        place_of = {number: place for place, number in enumerate(numbers)}
        places = [place_of[sample.prompt] for sample in self._samples[: self._next]]
        self._cache.extend(places)
        if self._next < len(self._samples) and (last := numbers[-1]) == self._samples[self._next].prompt:
            self._first[last] = logits.block(len(numbers) - 1, len(numbers))
        return logits.select(torch.tensor(places, device=self._model.device))

    def _after(self, ended: list[int], tokens_S: Tensor, logits: Logits) -> Logits | None:
        """The logits of the next step, once these rows have ended; None where all have and no sample waits.

        `logits` are those of this step, from which `tokens_S` were drawn.
        """
        for row in ended:
            self._unfinished[self._samples[self._rows[row]].prompt] -= 1
            if self._strings is not None:
                self._strings.forget(self._rows[row])
            self._rows[row] = -1
        idle = [row for row, number in enumerate(self._rows) if number < 0]
        live = len(self._rows) - len(idle)
        room = self._most_rows - live if self._refills or not live else 0
        starting = min(room, len(self._samples) - self._next)
        if live + starting == 0:
            return None
        if (rows := row_count(live)) < len(self._rows):
            kept = self._shrink(idle[: len(self._rows) - rows])
            tokens_S, logits = tokens_S.index_select(0, kept), logits.select(kept)
            idle = [row for row, number in enumerate(self._rows) if number < 0]
        if live:
            logits = self._model.step(tokens_S, self._cache)
        if starting:
            logits = self._start(starting, idle, logits)
        self._free_prompts()
        self._occupy(self._rows)
        return logits

    def _shrink(self, dropped: list[int]) -> Tensor:
        """Drop idle rows; returns which row each that is left was."""
        order = moved_up(len(self._rows), dropped)
        self._cache.keep(order)
        self._rows = [self._rows[row] for row in order]
        kept = torch.tensor(order, dtype=torch.int64, device=self._model.device)
        self._positions_S = self._positions_S.index_select(0, kept)
        return kept

    def _start(self, count: int, idle: list[int], logits: Logits) -> Logits:
        """Give rows to the next samples, idle ones first; returns the logits of all rows."""
        numbers = range(self._next, self._next + count)
        self._next += count
        self._read(numbers)
        prompts = [self._samples[number].prompt for number in numbers]
        first = joined([self._first[prompt] for prompt in prompts])
        place_of = {number: place for place, number in enumerate(self._places)}
        places = [place_of[prompt] for prompt in prompts]
        again = idle[:count]
        chosen = torch.tensor(again, dtype=torch.int64, device=self._model.device)
        self._cache.restart(again, places[: len(again)])
        logits.put(chosen, first.block(0, len(again)))
        self._positions_S[chosen] = 0
        for row, number in zip(again, numbers, strict=False):
            self._rows[row] = number
        if more := count - len(again):
            self._cache.extend(places[len(again) :])
            logits = joined([logits, first.block(len(again), count)])
            self._positions_S = torch.cat([self._positions_S, self._positions_S.new_zeros(more)])
            self._rows += numbers[len(again) :]
        waiting = self._samples[self._next].prompt if self._next < len(self._samples) else -1
        self._first = {number: first for number, first in self._first.items() if number >= waiting >= 0}
        return logits

    def _read(self, numbers: range) -> None:
        """Read the prompts of these samples where they are not, and with them some that follow."""
        if all(self._samples[number].prompt in self._first for number in numbers):
            return
        ahead = range(numbers.start, min(numbers.stop + self._ahead * self._refills, len(self._samples)))
        wanted = dict.fromkeys(self._samples[number].prompt for number in ahead)
        new = [prompt for prompt in wanted if prompt not in self._first]
        logits = self._model.prefill([self._prompts[prompt] for prompt in new], self._cache)
        self._places += new
        self._first.update((prompt, logits.block(place, place + 1)) for place, prompt in enumerate(new))

    def _free_prompts(self) -> None:
        freed = [place for place, prompt in enumerate(self._places) if not self._unfinished[prompt]]
        if freed:
            order = moved_up(len(self._places), freed)
            self._cache.keep_prompts(order)
            self._places = [self._places[place] for place in order]

    def _occupy(self, rows: list[int]) -> None:
        """Note the sample of each row; an idle row goes on with the seed and limit of any."""
        self._rows = rows
        self._sample_S = torch.tensor(rows)
        chosen = self._sample_S.clamp(min=0).to(self._model.device)
        self._seeds_S: Tensor = self._seeds.index_select(0, chosen)
        self._limits_S: Tensor = self._limits.index_select(0, chosen)


def joined(parts: Sequence[Logits]) -> Logits:
    """One row after another."""
    memory = [part.memory_SV for part in parts if part.memory_SV is not None]
    return Logits(torch.cat([part.policy_SV for part in parts]), torch.cat(memory) if memory else None)


class _Log:
    """Draws, step by step."""

    def __init__(self) -> None:
        self._draws: list[Draw] = []
        self._samples: list[Tensor] = []

    def add(self, drawn: Draw, sample_S: Tensor) -> None:
        """Note one step's tokens, and whose they are: -1 for nobody's."""
        self._draws.append(drawn)
        self._samples.append(sample_S)

    def samples(self, count: int, stops: Tensor, at_string: Collection[int] = ()) -> Samples:
        """Return the tokens of samples `0 .. count - 1`; those `at_string` have stopped, whatever their last token."""
        sample_T = torch.cat(self._samples)
        drawn = join(self._draws, torch.cat).apply(Tensor.cpu)
        # Within a sample the order of steps is kept, and -1 comes first.
        order = sample_T.argsort(stable=True)
        order = order[int((sample_T < 0).sum()) :]
        drawn = drawn.apply(lambda values: values.index_select(0, order))
        lengths = sample_T[order].bincount(minlength=count)
        last = drawn.tokens_S[lengths.cumsum(0) - 1]
        stopped = torch.isin(last, stops)
        stopped[list(at_string)] = True
        return Samples(drawn, lengths.tolist(), stopped.tolist())
