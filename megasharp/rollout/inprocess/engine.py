"""The in-process engine: the engine protocol over a policy and, if wanted, a memory network, on one device.

`InProcessEngine` samples at most `max_batch` responses at once, so the cache's memory is bounded; the next one begins
as soon as one has ended. A completion depends on its prompt, its seed and the weights (up to rounding), not on its
batch.

`Composite` is the policy, and beside it the memory network where there is one, as the one model that the decode loop
sees (`generation.py` says why two networks). Both read the same tokens and keep caches of their own, row for row alike.
A step costs the policy's step plus the memory's. Logits are subtracted token by token, so both must have the same
vocabulary (`check_same_vocabulary`).

`Candidates` are the most probable tokens at each position of a text that is given, for `evals/probe.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megasharp.common.errors import UserError, one_line
from megasharp.common.records import (
    MEMORY_PREFIX,
    Completion,
    GenerateRequest,
    SamplingParams,
)
from megasharp.convert.architecture import Architecture
from megasharp.convert.hf_folder import read_config
from megasharp.rollout.inprocess.cache import KeyValueCache
from megasharp.rollout.inprocess.decode_loop import DecodeLoop, Read
from megasharp.rollout.inprocess.decoder import Decoder, load_slots
from megasharp.rollout.inprocess.generation import BLOCK_ELEMENTS, Logits, check_sampling
from megasharp.rollout.inprocess.open_requests import OpenRequests
from megasharp.rollout.inprocess.stop_strings import Decode, StopStrings
from megasharp.rollout.streaming import Asked, Ended, Feed
from megasharp.tasks.tokenizer import load_tokenizer

TOKENIZER_FILE = "tokenizer.json"
# Rows of an engine that is not told another number: their keys and values are in memory at once.
MOST_ROWS = 512


def check_same_vocabulary(policy_folder: Path, policy: Architecture, memory_folder: Path, memory: Architecture) -> None:
    """Refuse a memory network whose vocabulary is not the policy's.

    Tokenizers are compared where both folders have a tokenizer.json, by the ids of their tokens.

    Raises:
        UserError: the vocabulary sizes or the tokens' ids differ, or a tokenizer.json cannot be read.
    """
    if policy.vocab != memory.vocab:
        raise UserError(
            f"the policy {policy_folder} has vocab_size {policy.vocab}, the memory network {memory_folder} "
            f"{memory.vocab}; choose a memory of the policy's model family, with the same vocabulary"
        )
    files = (policy_folder / TOKENIZER_FILE, memory_folder / TOKENIZER_FILE)
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    ours, theirs = (_token_ids(file) for file in files)
    differing = sorted(token for token, _ in ours.items() ^ theirs.items())
    if differing:
        token = differing[0]
        raise UserError(
            f"token {token!r} has id {ours.get(token)} in {files[0]} but {theirs.get(token)} in {files[1]}; "
            "the memory network must share the policy's tokenizer"
        )


def _token_ids(file: Path) -> dict[str, int]:
    try:
        return dict(PreTrainedTokenizerFast(tokenizer_file=str(file)).get_vocab())
    except Exception as error:  # the tokenizers library raises plain Exception for a bad file
        raise UserError(f"{file}: cannot be read ({one_line(error)}); copy it from the model again") from error


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The next-token distributions before T given tokens, at temperature 1; log-probs and entropies in nats, float32.

    `logp_T` is the given token's, `rank_T` (int64) how many tokens are more probable than it, `entropy_T` that of the
    whole distribution. `tokens_TN` (int64) and `topn_logp_TN` are the N most probable tokens, the most probable first.
    """

    logp_T: Tensor
    rank_T: Tensor
    entropy_T: Tensor
    tokens_TN: Tensor
    topn_logp_TN: Tensor


def candidates_of(logits_TV: Tensor, given_T: Tensor, n: int) -> Candidates:
    """Compare `logits_TV` [T, V] with the given tokens `given_T` (int64); in float64, ties go to the lower id."""
    logp_TV = torch.log_softmax(logits_TV.double(), dim=-1)
    given_T1 = logp_TV.gather(1, given_T[:, None])
    entropy_T = torch.special.entr(logp_TV.exp()).sum(dim=-1)
    ranked_TV, token_of_rank_TV = logp_TV.sort(dim=-1, descending=True, stable=True)
    return Candidates(
        logp_T=given_T1.squeeze(1).float(),
        rank_T=(logp_TV > given_T1).sum(dim=-1),
        entropy_T=entropy_T.float(),
        tokens_TN=token_of_rank_TV[:, :n],
        topn_logp_TN=ranked_TV[:, :n].float(),
    )


def joined(parts: list[Candidates]) -> Candidates:
    """Join the candidates of one text's parts, in order, along T."""
    return Candidates(
        torch.cat([part.logp_T for part in parts]),
        torch.cat([part.rank_T for part in parts]),
        torch.cat([part.entropy_T for part in parts]),
        torch.cat([part.tokens_TN for part in parts]),
        torch.cat([part.topn_logp_TN for part in parts]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """Each network's cache; row `s` of both belongs to the same sample."""

    policy: KeyValueCache
    memory: KeyValueCache | None

    def extend(self, prompts: Sequence[int]) -> None:
        """Begin more rows behind those that there are, one for each of these prompts."""
        for cache in self._both():
            cache.extend(prompts)

    def restart(self, rows: Sequence[int], prompts: Sequence[int]) -> None:
        """Begin these rows again, for these prompts."""
        for cache in self._both():
            cache.restart(rows, prompts)

    def keep(self, order: Sequence[int]) -> None:
        """Row `i` becomes what row `order[i]` was; the others are dropped."""
        for cache in self._both():
            cache.keep(order)

    def keep_prompts(self, order: Sequence[int]) -> None:
        """Prompt `i` becomes what prompt `order[i]` was; the others are freed."""
        for cache in self._both():
            cache.keep_prompts(order)

    def _both(self) -> list[KeyValueCache]:
        return [cache for cache in (self.policy, self.memory) if cache is not None]


class Composite:
    """Satisfies `decode_loop.Model` with one network or with two."""

    def __init__(
        self,
        policy: Architecture,
        memory: Architecture | None,
        dtype: torch.dtype,
        device: torch.device,
        memory_window: int | None = None,
        records_experts: bool = False,
    ) -> None:
        self.device = device
        self._policy = Decoder(policy, dtype, device, records_experts=records_experts)
        self._memory = Decoder(memory, dtype, device, memory_window) if memory else None

    def policy_alone(self) -> Composite:
        """The same weights without the memory network."""
        alone = copy(self)
        alone._memory = None
        return alone

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every weight of both networks into place; the memory's names begin with `MEMORY_PREFIX`.

        Raises UserError for an unknown, repeated, wrong-shaped or missing one; buffers then mix old and new.
        """
        slots = dict(self._policy.weights.slots)
        if self._memory is not None:
            slots.update((MEMORY_PREFIX + name, slot) for name, slot in self._memory.weights.slots.items())
        load_slots(slots, tensors)

    def new_cache(self) -> Caches:
        """Return caches without prompts and rows."""
        return Caches(self._policy.new_cache(), None if self._memory is None else self._memory.new_cache())

    def prefill(self, prompts: Sequence[Sequence[int]], cache: Caches) -> Read:
        """Read prompts, and put them behind those of both caches."""
        logits_BV, experts = self._policy.prefill(prompts, cache.policy)
        memory_BV = None
        if self._memory is not None:
            assert cache.memory is not None
            memory_BV, _ = self._memory.prefill(prompts, cache.memory)
        last = None if experts is None else torch.stack([text[-1] for text in experts])
        return Read(Logits(logits_BV, memory_BV, last), experts)

    def read(self, tokens: Sequence[int], first: int, rows: int) -> Iterator[Tensor]:
        """The policy's own logits that predict tokens `first` and later of one text, at most [`rows`, V] at a time."""
        return self._policy.read(tokens, first, rows)

    def step(self, tokens_S: Tensor, cache: Caches) -> Logits:
        """Append `tokens_S` (int64, one per row) to both caches; returns the logits that follow."""
        logits_SV, experts_SLK = self._policy.step(tokens_S, cache.policy)
        memory_SV = None
        if self._memory is not None:
            assert cache.memory is not None
            memory_SV, _ = self._memory.step(tokens_S, cache.memory)
        return Logits(logits_SV, memory_SV, experts_SLK)


class InProcessEngine:
    """Samples from the weights of any family; satisfies `megasharp.rollout.step_request.Engine`.

    `memory_folder` adds a memory network: where `SamplingParams.memory_mu` is given, that share of its logits is
    subtracted and its log-probs are recorded. It attends to the prompt and to the last `memory_window` tokens; None: to
    all. With `records_experts` completions say where a mixture of experts sent each token (`Completion.experts`). The
    constructor reads no weights, only config.json (of two folders, tokenizer.json too); the first `load_weights` brings
    them.
    Raises UserError when an architecture is not supported, or the two networks' vocabularies differ.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_batch: int = MOST_ROWS,
        memory_folder: Path | None = None,
        memory_window: int | None = None,
        records_experts: bool = False,
    ) -> None:
        assert max_batch >= 1, max_batch
        self._policy = read_config(model_folder)[2]
        self._memory = read_config(memory_folder)[2] if memory_folder else None
        if memory_folder and self._memory:
            check_same_vocabulary(model_folder, self._policy, memory_folder, self._memory)
        self._model: Composite | None = Composite(
            self._policy, self._memory, dtype, device, memory_window, records_experts
        )
        self._max_batch = max_batch
        self._folder = model_folder
        self._decode: Decode | None = None
        self._version = -1
        self._complete = False

    @property
    def version(self) -> int:
        """The policy version last loaded whole; -1 before the first."""
        return self._version

    def healthy(self) -> bool:
        """Return True while the weights are whole: not before the first load, after a failed one, or after `close`."""
        return self._complete

    def close(self) -> None:
        """Free the weights."""
        self._complete = False
        self._model = None

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights of policy version `version` into place, and all of the memory network's where there is one.

        The memory's names begin with `MEMORY_PREFIX`.
        Raises UserError naming the first unknown, repeated, wrong-shaped or missing tensor; the engine then
        keeps its old version number but is unhealthy, and generates nothing until a load succeeds.
        """
        if self._model is None:
            raise RuntimeError("the in-process engine was closed")
        self._complete = False
        self._model.load(tensors)
        self._version = version
        self._complete = True

    def candidates(self, prompt: Sequence[int], response: Sequence[int], n: int) -> Candidates:
        """Score the T tokens of a response, and the `n` likeliest, by the policy alone at temperature 1; on the CPU.

        Raises UserError as `generate` does for the prompt.
        """
        if self._model is None or not self._complete:
            raise RuntimeError("the in-process engine holds no complete weights; call load_weights first")
        self._check_prompt((*prompt, *response), 0)
        # Blocks of rows bound the memory of the float64 sums.
        rows = max(1, BLOCK_ELEMENTS // self._policy.vocab)
        given = torch.tensor(list(response), dtype=torch.int64)
        with torch.inference_mode():
            logits = self._model.read((*prompt, *response), len(prompt), rows)
            blocks = zip(logits, torch.split(given, rows), strict=True)
            return joined([candidates_of(block_TV.cpu(), given_T, n) for block_TV, given_T in blocks])

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """Sample every request; the outer list follows `requests`, the inner one each request's seeds.

        Stop strings are found with the tokenizer of the model's folder. Raises UserError for an empty or too long
        prompt, a token outside the vocabulary, bad parameters, logits that are not finite, or no tokenizer.
        """
        opened = self.open()
        for request in requests:
            self.check(request, sampling)
        for number in in_order(requests, sampling):
            opened.add(number, requests[number], sampling)
        done: dict[int, list[Completion]] = {}
        while not opened.done:
            done |= opened.advance()
        return [done[number] for number in range(len(requests))]

    @property
    def capacity(self) -> int:
        """Samples that are decoded at once."""
        return self._max_batch

    @contextmanager
    def stream(self, asked: Iterable[Asked], at_once: int) -> Iterator[Iterator[Ended]]:
        """Sample requests as `generate` does, and answer each when its samples have ended.

        Raises UserError as `generate` does when it comes to a request that it refuses.
        """
        yield self._streamed(Feed(asked, at_once))

    def _streamed(self, feed: Feed) -> Iterator[Ended]:
        opened = self.open()
        while True:
            for place, (request, sampling) in feed.fresh():
                self.check(request, sampling)
                opened.add(place, request, sampling)
            if opened.done:
                return
            for place, completions in opened.advance():
                feed.ended(place)
                yield place, completions

    def open(self) -> OpenRequests[Caches]:
        """Return requests, none yet, that are sampled from the present weights, which must stay meanwhile."""
        model = self._model
        if model is None or not self._complete:
            raise RuntimeError("the in-process engine holds no complete weights; call load_weights first")

        def new_loop(sampling: SamplingParams) -> DecodeLoop[Caches]:
            # Without a mu the memory network need not be computed.
            used = model if sampling.memory_mu is not None else model.policy_alone()
            return DecodeLoop(used, sampling, self._max_batch, self._stop_strings(sampling))

        return OpenRequests(new_loop, self._version, self._max_batch)

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        if not sampling.stop:
            return None
        if self._decode is None:
            self._decode = load_tokenizer(self._folder).decode_batch
        return StopStrings(sampling.stop, self._decode)

    def check(self, request: GenerateRequest, sampling: SamplingParams) -> None:
        """Raise UserError for what cannot be sampled, as `generate` does."""
        check_sampling(sampling)
        if sampling.memory_mu is not None and self._memory is None:
            raise UserError(
                f"sampling.memory_mu is {sampling.memory_mu}, but the engine holds no memory network; "
                "leave it out or give the memory network's folder"
            )
        most = request.under(sampling).max_tokens
        self._check_prompt(request.tokens, most)
        for begun in request.begun:
            if len(begun) >= most:
                raise UserError(f"{len(begun)} tokens of a response are begun, and max_tokens is {most}: raise it")
            self._check_prompt((*request.tokens, *begun), most - len(begun))

    def _check_prompt(self, tokens: tuple[int, ...], max_tokens: int) -> None:
        if not tokens:
            raise UserError("a prompt is empty; the engine needs at least one token: check the template")
        for network, which in ((self._policy, "model's"), (self._memory, "memory network's")):
            if network and len(tokens) + max_tokens > network.max_positions:
                raise UserError(
                    f"a prompt of {len(tokens)} tokens and max_tokens {max_tokens} exceed the {which} "
                    f"max_position_embeddings {network.max_positions}; shorten one of them"
                )
        if not 0 <= min(tokens) <= max(tokens) < self._policy.vocab:
            raise UserError(
                f"a prompt holds token ids {min(tokens)}..{max(tokens)}, but the model's vocabulary has "
                f"{self._policy.vocab}; check that the tokenizer belongs to the model"
            )


def in_order(requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[int]:
    """Return the places of requests in the order in which they begin.

    The largest limits of tokens begin first, for they may end last, and of these the longest prompts, so that the room
    that prompts take only falls. Requests of one prompt follow each other.
    """
    limits = [request.under(sampling).max_tokens for request in requests]
    places = sorted(
        range(len(requests)), key=lambda number: (limits[number], len(requests[number].tokens)), reverse=True
    )
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number in places:
        by_prompt.setdefault(requests[number].tokens, []).append(number)
    return [number for numbers in by_prompt.values() for number in numbers]
