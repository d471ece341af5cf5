"""Sampling in the processes of the policy's ranks: every rank has an in-process engine, and samples its share.

`RankEngines` is the driver's half; `open_engine`, `load`, `sample` and others run in every rank, through `Ranks.call`.
A rank loads its engine from its own part of the learners, so a push moves no weights between processes. That needs
ranks that each hold the whole model: data-parallel ones. A completion does not depend on its batch, so it does not
depend on the rank either.

Ranks keep the requests that they sample between calls, and a call lasts about a second: requests go in, those that are
whole come out, and no rank waits for a long response of another. So the driver hears signals and stores answers
meanwhile. Completions travel back as columns: all tokens of a rank's in one tensor, and so on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megasharp.common.records import (
    MEMORY_PREFIX,
    Completion,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    VersionSpan,
)
from megasharp.common.signals import SaveAsked, held, saves_wait
from megasharp.learner.learner import RankLearner
from megasharp.learner.ranks.all_ranks import MemoryNetwork, RanksLearner
from megasharp.rollout.inprocess import InProcessEngine
from megasharp.rollout.inprocess.engine import MOST_ROWS, Caches, Candidates, in_order
from megasharp.rollout.inprocess.open_requests import OpenRequests
from megasharp.rollout.streaming import Asked, Ended, Feed

# A request with its place among those asked of the engines.
Given = tuple[int, GenerateRequest, SamplingParams]
# About the time that ranks sample in one call.
_CALL_S = 1.0
# A completion's tensors, of which an engine fills those that were asked for.
_COLUMNS = (
    "tokens",
    "sampler_logp",
    "policy_logp",
    "memory_logp",
    "argmax_moved",
    "calibration_kl",
    "entropy",
    "top_logp",
)


@dataclass(frozen=True, slots=True)
class EngineFolders:
    """Folders of the networks' architectures, the window of the memory network, and whether experts are recorded."""

    policy: Path
    memory: Path | None = None
    memory_window: int | None = None
    records_experts: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A share's completions, one behind the other: `tensors` over all tokens, by the name of a completion's field.

    `lengths_S` int64 and `stopped_S` bool: each one's number of tokens, and whether a stop token ended it. `experts`
    are over all tokens that were read, prompts included, of which each has `read_S` (int64); both None where nobody
    recorded them.
    """

    tensors: Mapping[str, Tensor]
    lengths_S: Tensor
    stopped_S: Tensor
    experts: Tensor | None = None
    read_S: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Requests of which all samples have ended, by place, and their completions in this order."""

    places: list[int]
    columns: Columns


# ---- in every rank ------------------------------------------------------------------------------------------------

_engines: WeakKeyDictionary[RankLearner, InProcessEngine] = WeakKeyDictionary()
# Requests that are not whole yet.
_opened: WeakKeyDictionary[RankLearner, OpenRequests[Caches]] = WeakKeyDictionary()
# From the call with the memory network's part to the call with the policy's, which follows at once.
_memory_weights: list[tuple[str, Tensor]] = []


def open_engine(part: RankLearner, folders: EngineFolders) -> None:
    """Make this rank's engine, on the rank's device and without weights."""
    _engines[part] = InProcessEngine(
        folders.policy,
        dtype=torch.float32,
        device=part.device,
        memory_folder=folders.memory,
        memory_window=folders.memory_window,
        records_experts=folders.records_experts,
    )


def hold_memory(part: RankLearner) -> None:
    """Keep the memory network's weights for `load`."""
    _memory_weights[:] = [(MEMORY_PREFIX + name, tensor) for name, tensor in part.export_weights(everywhere=True)]


def load(part: RankLearner, version: int) -> None:
    """Load this rank's weights into its engine as `version`, with those of the memory network that are held."""

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield from part.export_weights(everywhere=True)
        yield from _memory_weights

    try:
        _engines[part].load_weights(version, weights())
    finally:
        _memory_weights.clear()


def sample(part: RankLearner, fresh: Sequence[Given], seconds: float) -> list[Whole]:
    """Add requests to those that this rank samples; go on for about so many seconds, and return what is whole by then.

    Raises UserError as the engine does.
    """
    until = time.monotonic() + seconds
    engine = _engines[part]
    opened = _opened.pop(part, None) or engine.open()
    for place, request, sampling in fresh:
        engine.check(request, sampling)
        opened.add(place, request, sampling)
    ended: list[Ended] = []
    while not opened.done:
        ended += opened.advance()
        if time.monotonic() >= until:
            break
    if not opened.done:
        _opened[part] = opened
    return to_whole(ended)


def drop(part: RankLearner) -> None:
    """Forget the requests that this rank samples."""
    _opened.pop(part, None)


def score(part: RankLearner, texts: Sequence[tuple[Sequence[int], Sequence[int]]], n: int) -> list[Candidates]:
    """Return the candidates of each text, a prompt and a response, as the engine scores them."""
    return [_engines[part].candidates(prompt, response, n) for prompt, response in texts]


def to_whole(ended: Sequence[Ended]) -> list[Whole]:
    """Lay the completions of each kind of sampling behind each other."""
    of_kind: dict[tuple[str, ...], list[Ended]] = {}
    for place, completions in ended:
        kind = tuple(name for name in _COLUMNS if getattr(completions[0], name) is not None)
        of_kind.setdefault(kind, []).append((place, completions))
    return [
        Whole([place for place, _ in some], to_columns([each for _, completions in some for each in completions], kind))
        for kind, some in of_kind.items()
    ]


def to_columns(completions: Sequence[Completion], named: Sequence[str]) -> Columns:
    """Lay completions, at least one, behind each other; all have these tensors, and all have experts or none has."""
    experts = [completion.experts for completion in completions if completion.experts is not None]
    return Columns(
        {name: torch.cat([getattr(completion, name) for completion in completions]) for name in named},
        torch.tensor([completion.tokens.numel() for completion in completions]),
        torch.tensor([completion.finish_reason is FinishReason.STOP for completion in completions]),
        torch.cat(experts) if experts else None,
        torch.tensor([each.shape[0] for each in experts]) if experts else None,
    )


# ---- in the driver ------------------------------------------------------------------------------------------------


def from_columns(columns: Columns, seeds: Sequence[int], version: int) -> list[Completion]:
    """Return the completions, in order, that were sampled with these seeds by that version of the policy."""
    lengths = columns.lengths_S.tolist()
    missing = dict.fromkeys(_COLUMNS, [None] * len(lengths))
    parts = missing | {name: torch.split(tensor, lengths) for name, tensor in columns.tensors.items()}
    rows = zip(*(parts[name] for name in _COLUMNS), strict=True)
    experts: Sequence[Tensor | None] = [None] * len(lengths)
    if columns.experts is not None and columns.read_S is not None:
        experts = torch.split(columns.experts, columns.read_S.tolist())
    stopped = columns.stopped_S.tolist()
    return [
        Completion(
            **dict(zip(_COLUMNS, row, strict=True)),
            version_spans=(VersionSpan(version, 0, length),),
            finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
            seed=seed,
            experts=routed,
        )
        for row, routed, length, has_stopped, seed in zip(rows, experts, lengths, stopped, seeds, strict=True)
    ]


def shares_of(requests: Sequence[GenerateRequest], sampling: SamplingParams, count: int) -> list[list[int]]:
    """Deal requests to `count` ranks: their places in `requests`, in order, with about equal tokens to compute.

    The samples of a prompt stay together, because they share its cache.
    """
    costs = [len(request.tokens) + len(request.seeds) * request.under(sampling).max_tokens for request in requests]
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for place in sorted(range(len(requests)), key=lambda place: -costs[place]):
        least = loads.index(min(loads))
        shares[least].append(place)
        loads[least] += costs[place]
    return [sorted(share) for share in shares]


class _Flight:
    """The requests that the ranks sample, each in one of them; only one thread at a time may use it."""

    def __init__(self, policy: RanksLearner, count: int, version: int) -> None:
        self.requests: dict[int, GenerateRequest] = {}
        self._policy = policy
        self._version = version
        self._rank_of: dict[int, int] = {}
        self._loads = [0] * count
        self._fresh: list[list[Given]] = [[] for _ in range(count)]
        # Ranks that fail are ended.
        self._failed = False

    def give(self, rank: int, given: Given) -> None:
        """Let the next call bring a request, with at least one seed, to a rank."""
        place, request, _ = given
        self.requests[place] = request
        self._rank_of[place] = rank
        self._loads[rank] += len(request.seeds)
        self._fresh[rank].append(given)

    def give_least(self, given: Given) -> None:
        """Let the rank have a request that samples least."""
        self.give(self._loads.index(min(self._loads)), given)

    def advance(self) -> list[Ended]:
        """Have every rank sample for about a second; returns the requests that are whole."""
        fresh, self._fresh = self._fresh, [[] for _ in self._fresh]
        self._failed = True
        answers = self._policy.call_shared(sample, fresh, _CALL_S)
        self._failed = False
        return [ended for whole in chain(*answers) for ended in self._taken(whole)]

    def _taken(self, whole: Whole) -> Iterator[Ended]:
        requests = [self.requests.pop(place) for place in whole.places]
        seeds = [seed for request in requests for seed in request.seeds]
        completions = iter(from_columns(whole.columns, seeds, self._version))
        for place, request in zip(whole.places, requests, strict=True):
            self._loads[self._rank_of.pop(place)] -= len(request.seeds)
            yield place, [next(completions) for _ in request.seeds]

    def end(self, pool: Executor | None = None) -> None:
        """Have the ranks forget what is not whole, once the call is answered that is under way in `pool`."""
        with held():
            if pool is not None:
                pool.shutdown()
            if self.requests and not self._failed:
                self._policy.call(drop)


def _streamed(flight: _Flight, feed: Feed, pool: ThreadPoolExecutor) -> Iterator[Ended]:
    ended: list[Ended] = []
    while True:
        for place, (request, sampling) in feed.fresh():
            if request.seeds:
                flight.give_least((place, request, sampling))
            else:
                ended.append((place, []))
        call = pool.submit(flight.advance) if flight.requests else None
        yield from ended
        if call is None:
            return
        ended = call.result()
        for place, _ in ended:
            feed.ended(place)


class RankEngines:
    """The engines of all ranks as one; satisfies `rollout.step_request.StreamingEngine` and `evals.probe.Scorer`.

    `policy` has `count` ranks, each with the whole model. Their engines end with them.
    """

    def __init__(
        self, policy: RanksLearner, memory: RanksLearner | MemoryNetwork | None, count: int, folders: EngineFolders
    ) -> None:
        self._policy = policy
        self._memory = memory
        self._count = count
        self._version = -1
        self._open = True
        policy.call(open_engine, folders)

    @property
    def version(self) -> int:
        """The policy version last loaded; -1 before the first."""
        return self._version

    def healthy(self) -> bool:
        """Return True from the first load on, until `close`."""
        return self._open and self._version >= 0

    def close(self) -> None:
        """Sample no more."""
        self._open = False

    def load_own(self, version: int) -> None:
        """Have every rank load its engine from the networks that it trains, as `version` of the policy."""
        if self._memory is not None:
            self._memory.call(hold_memory)
        self._policy.call(load, version)
        self._version = version

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """Sample every request; the outer list follows `requests`, the inner one each request's seeds.

        A request to save waits until the ranks answer. Raises UserError as a rank's engine does.
        """
        flight = _Flight(self._policy, self._count, self._version)
        done: dict[int, list[Completion]] = {place: [] for place, request in enumerate(requests) if not request.seeds}
        for rank, share in enumerate(shares_of(requests, sampling, self._count)):
            for number in in_order([requests[place] for place in share], sampling):
                if (request := requests[share[number]]).seeds:
                    flight.give(rank, (share[number], request, sampling))
        try:
            while flight.requests:
                with saves_wait():
                    done |= flight.advance()
        except SaveAsked:
            flight.end()
            raise
        return [done[place] for place in range(len(requests))]

    @property
    def capacity(self) -> int:
        """Samples that all ranks decode at once."""
        return self._count * MOST_ROWS

    @contextmanager
    def stream(self, asked: Iterable[Asked], at_once: int) -> Iterator[Iterator[Ended]]:
        """Sample requests as `generate` does, and answer each when its samples have ended.

        Ranks go on while the caller works on what has ended. Whatever ends the block but the end of the command waits
        for the call that is under way, about a second: its answer would be taken for that of the next call.
        """
        flight = _Flight(self._policy, self._count, self._version)
        pool = ThreadPoolExecutor(1)
        try:
            yield _streamed(flight, Feed(asked, at_once), pool)
        except SystemExit:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        except BaseException:
            flight.end(pool)
            raise
        flight.end(pool)

    def candidates(self, prompt: Sequence[int], response: Sequence[int], n: int) -> Candidates:
        """Score the tokens of a response, and the `n` likeliest, by the policy alone at temperature 1."""
        texts: list[list[tuple[Sequence[int], Sequence[int]]]] = [[(prompt, response)]]
        texts += [[] for _ in range(1, self._count)]
        return self._policy.call_shared(score, texts, n)[0][0]
