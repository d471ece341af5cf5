"""Sampling in the processes of the policy's ranks: every rank has an in-process engine, and samples its share.

`RankEngines` is the driver's half; `open_engine`, `load`, `sample` and others run in every rank, through `Ranks.call`.
A rank loads its engine from its own part of the learners, so a push moves no weights between processes. That needs
ranks that each hold the whole model: data-parallel ones. A completion does not depend on its batch, so it does not
depend on the rank either. Completions travel back as columns: all tokens of a share in one tensor, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from megasharp.common.signals import saves_wait
from megasharp.learner.learner import RankLearner
from megasharp.learner.ranks.all_ranks import MemoryNetwork, RanksLearner
from megasharp.rollout.inprocess import InProcessEngine
from megasharp.rollout.inprocess.engine import MOST_ROWS, Candidates
from megasharp.rollout.streaming import Asked, Ended, in_slices

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
    """Folders of the networks' architectures, and the window of the memory network."""

    policy: Path
    memory: Path | None = None
    memory_window: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A share's completions, one behind the other: `tensors` over all tokens, by the name of a completion's field.

    `lengths_S` int64 and `stopped_S` bool: each one's number of tokens, and whether a stop token ended it.
    """

    tensors: Mapping[str, Tensor]
    lengths_S: Tensor
    stopped_S: Tensor


# ---- in every rank ------------------------------------------------------------------------------------------------

_engines: WeakKeyDictionary[RankLearner, InProcessEngine] = WeakKeyDictionary()
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


def sample(part: RankLearner, share: Sequence[GenerateRequest], sampling: SamplingParams) -> Columns | None:
    """Sample a share of the requests; None where it is empty. Raises UserError as the engine does."""
    if not share:
        return None
    sampled = _engines[part].generate(share, sampling)
    return to_columns([completion for completions in sampled for completion in completions])


def score(part: RankLearner, texts: Sequence[tuple[Sequence[int], Sequence[int]]], n: int) -> list[Candidates]:
    """Return the candidates of each text, a prompt and a response, as the engine scores them."""
    return [_engines[part].candidates(prompt, response, n) for prompt, response in texts]


def to_columns(completions: Sequence[Completion]) -> Columns:
    """Lay completions of one engine and one kind of sampling, at least one, behind each other."""
    first = completions[0]
    named = [name for name in _COLUMNS if getattr(first, name) is not None]
    return Columns(
        {name: torch.cat([getattr(completion, name) for completion in completions]) for name in named},
        torch.tensor([completion.tokens.numel() for completion in completions]),
        torch.tensor([completion.finish_reason is FinishReason.STOP for completion in completions]),
    )


# ---- in the driver ------------------------------------------------------------------------------------------------


def from_columns(columns: Columns, seeds: Sequence[int], version: int) -> list[Completion]:
    """Return the completions, in order, that were sampled with these seeds by that version of the policy."""
    lengths = columns.lengths_S.tolist()
    missing = dict.fromkeys(_COLUMNS, [None] * len(lengths))
    parts = missing | {name: torch.split(tensor, lengths) for name, tensor in columns.tensors.items()}
    rows = zip(*(parts[name] for name in _COLUMNS), strict=True)
    return [
        Completion(
            **dict(zip(_COLUMNS, row, strict=True)),
            version_spans=(VersionSpan(version, 0, length),),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            seed=seed,
        )
        for row, length, stopped, seed in zip(rows, lengths, columns.stopped_S.tolist(), seeds, strict=True)
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

        A request to save waits until it is done: ranks answer nothing meanwhile. Raises UserError as a rank's engine
        does.
        """
        with saves_wait():
            return self._sampled(requests, sampling)

    @property
    def capacity(self) -> int:
        """Samples that all ranks decode at once."""
        return self._count * MOST_ROWS

    @contextmanager
    def stream(self, asked: Iterable[Asked], at_once: int) -> Iterator[Iterator[Ended]]:
        """Sample requests as `generate` does, and answer each when its samples have ended."""
        yield in_slices(self.generate, asked, at_once)

    def _sampled(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        places = shares_of(requests, sampling, self._count)
        shares = [[requests[place] for place in share] for share in places]
        answers = self._policy.call_shared(sample, shares, sampling)
        done: dict[int, list[Completion]] = {}
        for share, columns in zip(places, answers, strict=True):
            if columns is None:
                continue
            seeds = [seed for place in share for seed in requests[place].seeds]
            completions = iter(from_columns(columns, seeds, self._version))
            done |= {place: [next(completions) for _ in requests[place].seeds] for place in share}
        return [done[place] for place in range(len(requests))]

    def candidates(self, prompt: Sequence[int], response: Sequence[int], n: int) -> Candidates:
        """Score the tokens of a response, and the `n` likeliest, by the policy alone at temperature 1."""
        texts: list[list[tuple[Sequence[int], Sequence[int]]]] = [[(prompt, response)]]
        texts += [[] for _ in range(1, self._count)]
        return self._policy.call_shared(score, texts, n)[0][0]
