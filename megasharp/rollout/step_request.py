"""A step's request for rollouts, and what answers it: the terms that the loop, collectors and engines share.

In a reader's order: an engine, as the loop sees it (`Engine`, `AsyncEngine`); what a step asks for and gets
(`StepRequest`, `Collected`); filling a step with kept groups, where further rounds of prompts replace those that
selection drops (`fill`); and `GroupMaker`, which makes a request of a prompt, and a verified group of completions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from megasharp.common.errors import UserError
from megasharp.common.records import (
    Completion,
    FinishReason,
    GenerateRequest,
    Group,
    Outcome,
    Plausible,
    Prompt,
    Response,
    SamplingParams,
    TaskAnswer,
    TurnText,
    Verdict,
)
from megasharp.rollout.streaming import Asked, Ended, in_slices
from megasharp.rollout.tally import SURPLUS, Tally
from megasharp.rollout.turn_texts import Decode, decoded
from megasharp.tasks.environment import EnvironmentAnswer
from megasharp.tasks.final_answer import opens_thinking
from megasharp.tasks.judge import Item, Judge


class Engine(Protocol):
    """Anything that samples; weights reach it through `weight_sync`."""

    @property
    def version(self) -> int:
        """The policy version being served; -1 before the first weights."""
        ...

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """Sample every request; the outer list follows `requests`, the inner one each request's seeds."""
        ...

    def healthy(self) -> bool:
        """Return True where the engine can serve now."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class AsyncEngine(Engine, Protocol):
    """An engine that samples many requests at once, each answered when it is done."""

    @property
    def retried(self) -> int:
        """Number of responses sent again since the start, because an engine failed or began nothing of them."""
        ...

    def take_retried(self) -> list[int]:
        """Return the seeds of the samples sent again since the last call, each as often as it was."""
        ...

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Future[list[Completion]]:
        """Sample one request; returns at once. The completions follow the request's seeds.

        The future raises NotSampled where no engine samples the request, UserError for what ends the run.
        """
        ...

    def abort(self, futures: Sequence[Future[list[Completion]]]) -> None:
        """End these requests and wait until they are done: unfinished completions keep their tokens, and say ABORT."""
        ...


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that answers each request when its samples have ended."""

    @property
    def capacity(self) -> int:
        """Samples that are decoded at once; with fewer in flight the engine idles."""
        ...

    def stream(self, asked: Iterable[Asked], at_once: int) -> AbstractContextManager[Iterator[Ended]]:
        """Sample requests, begun in their order as there is room for `at_once` samples.

        Yields each one's place (0, 1, ...) and completions as soon as it is whole, in the order in which they end.
        Requests are taken from `asked` only as they begin.
        """
        ...


# Samples asked of an engine beyond those that it decodes at once, as a multiple: the next ones are there when some end.
_ASKED_AHEAD = 2


@contextmanager
def streamed(engine: Engine, asked: Iterable[Asked], at_once: int | None = None) -> Iterator[Iterator[Ended]]:
    """Do what `StreamingEngine.stream` does, with any engine: one that only has `generate` answers in slices.

    Without `at_once` there are as many in flight as keep the engine busy; such slices are single requests.
    """
    if isinstance(engine, StreamingEngine):
        with engine.stream(asked, at_once or _ASKED_AHEAD * engine.capacity) as ended:
            yield ended
    else:
        yield in_slices(engine.generate, asked, at_once or 1)


class PromptSource(Protocol):
    """Endless prompts."""

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts."""
        ...


class MemoryUse(Protocol):
    """The memory network's part in sampling: `SamplingParams.memory_mu` and `SamplingParams.plausible`."""

    @property
    def mu(self) -> float:
        """Factor of the memory network's logits, which are subtracted from the policy's."""
        ...

    @property
    def plausible(self) -> Plausible | None:
        """Guard that bars tokens by the policy's own probabilities; None bars none."""
        ...


class Meanwhile(Protocol):
    """Work on a step's groups for which their collection has time, while engines sample the rest."""

    def finished(self, group: Group) -> None:
        """Take a group that the step keeps."""
        ...

    def work(self) -> bool:
        """Do one piece of what is there to do; False: nothing was. Called only when no answer is ready."""
        ...


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One step's groups: `wanted` kept ones, after `select` and up to `refill_rounds` further rounds of prompts.

    `select` sets `dropped_reason` of the groups it refuses, each judged by itself. `memory` says how much of the memory
    network's logits is subtracted; None samples from the policy alone. With `last` no step follows. A response has at
    most `max_tokens` tokens, and a prompt `responses` responses; None is what the rollouts were made with. `meanwhile`
    is for collectors that wait for engines.
    """

    step: int
    wanted: int
    select: Callable[[list[Group]], list[Group]]
    refill_rounds: int = 0
    memory: MemoryUse | None = None
    last: bool = False
    max_tokens: int | None = None
    responses: int | None = None
    meanwhile: Meanwhile | None = None


@dataclass(frozen=True, slots=True)
class Collected:
    """A step's groups in the order of their prompts, dropped ones included.

    `seconds` is by stage: `rollout`, and `reward`, which is everything from text to verdict; they do not overlap.
    `metrics` are the collection's own, by their names; `tally` counts responses, and what becomes of them after it.
    """

    groups: list[Group]
    seconds: Mapping[str, float]
    metrics: Mapping[str, float]
    tally: Tally = field(default_factory=Tally)


# From a number of prompts, and the number of the first group, to groups after selection.
Collect = Callable[[int, int], list[Group]]

# A round asks for no more than this many times what is missing, however few groups were kept so far.
_MOST_PER_MISSING = 4


def fill(collect: Collect, wanted: int, refill_rounds: int) -> list[Group]:
    """Sample until `wanted` groups are kept, or for `refill_rounds` further rounds; returns all groups.

    A further round asks for as many prompts as the share kept so far makes necessary. Kept groups above `wanted` are
    marked as dropped with the reason `SURPLUS`, so that a step always trains on at most `wanted` groups.
    """
    groups = collect(wanted, 0)
    for _ in range(refill_rounds):
        missing = wanted - _kept(groups)
        if missing <= 0:
            break
        share = max(_kept(groups) / len(groups), 1.0 / _MOST_PER_MISSING)
        groups += collect(math.ceil(missing / share), len(groups))
    kept = [number for number, group in enumerate(groups) if group.dropped_reason is None]
    surplus = set(kept[wanted:])
    return [
        dataclasses.replace(group, dropped_reason=SURPLUS) if number in surplus else group
        for number, group in enumerate(groups)
    ]


def most_refills(wanted: int, refill_rounds: int) -> int:
    """Return the largest number of prompts that `fill` samples beyond the first `wanted`."""
    return wanted * _MOST_PER_MISSING * refill_rounds


def _kept(groups: list[Group]) -> int:
    return sum(group.dropped_reason is None for group in groups)


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """Limits of one source of a mixture: a limit of tokens, and a number of responses; None: as all have."""

    max_tokens: int | None = None
    responses: int | None = None


# Tokens of a prompt's end, in which it may open thinking.
_PROMPT_END = 16


@dataclass(frozen=True, slots=True)
class GroupMaker:
    """Makes requests of prompts and groups of completions.

    `decode` turns lists of token ids into texts, as a tokenizer's batch decoding with
    special tokens left out. `seed` is the run's. `limits` are those of a mixture's sources, by their names, and `sizes`
    are the numbers of responses that prompts have in the run's stages and sources. With `needs_experts` responses
    cannot train without the experts that engines record.
    """

    judge: Judge
    decode: Decode
    sampling: SamplingParams
    responses_per_prompt: int
    seed: int
    limits: Mapping[str, SourceLimits] = field(default_factory=dict)
    sizes: Collection[int] = ()
    needs_experts: bool = False

    def request(self, prompt: Prompt, responses: int | None = None) -> GenerateRequest:
        """Request all responses of a prompt: as many as its source has, or `responses`.

        Raises UserError where its task has no verifier.
        """
        if prompt.task not in self.judge.tasks:
            known = ", ".join(sorted(self.judge.tasks)) or "none"
            raise UserError(
                f"{prompt.source}: prompt {prompt.id} is of task {prompt.task}, which has no verifier; "
                f"known tasks: {known}"
            )
        own = self.limits.get(prompt.source, SourceLimits())
        return self._request(prompt, own.responses or responses or self.responses_per_prompt)

    def again(self, prompt: Prompt, responses: int) -> GenerateRequest:
        """Request as many responses of a prompt as an earlier stage did, where some stage asks for that many."""
        return self._request(prompt, responses) if responses in self.sizes else self.request(prompt)

    def _request(self, prompt: Prompt, responses: int) -> GenerateRequest:
        seeds = (response_seed(self.seed, prompt.id, prompt.epoch, index) for index in range(responses))
        own = self.limits.get(prompt.source, SourceLimits())
        return GenerateRequest(
            prompt.tokens, tuple(seeds), max_tokens=own.max_tokens, episode=episode_of(prompt.answer)
        )

    def sampling_for(self, order: StepRequest) -> SamplingParams:
        """Return the step's sampling parameters: its length limit, and its subtraction of a memory network."""
        sampling = replace(self.sampling, max_tokens=order.max_tokens or self.sampling.max_tokens)
        if order.memory is None:
            return sampling
        return replace(sampling, memory_mu=order.memory.mu, plausible=order.memory.plausible)

    def groups(
        self, names: Sequence[str], prompts: Sequence[Prompt], sampled: Sequence[Sequence[Completion]], version: int
    ) -> list[Group]:
        """Make one verified group per prompt, in order. A verifier's exception is an ERROR verdict."""
        flat = [(prompt, completion) for prompt, some in zip(prompts, sampled, strict=True) for completion in some]
        tokens = [completion.tokens.tolist() for _, completion in flat]
        texts = decoded([completion for _, completion in flat], self.decode)
        begun = self.decode([prompt.tokens[-_PROMPT_END:] for prompt in prompts])
        in_thinking = [opens_thinking(end) for end, some in zip(begun, sampled, strict=True) for _ in some]
        items = [
            Item(
                prompt.task,
                text,
                prompt.answer,
                prompt.question or prompt.text,
                prompt.turns,
                prompt.row,
                its_tokens,
                in_thinking=opened,
            )
            for (prompt, _), (text, _), its_tokens, opened in zip(flat, texts, tokens, in_thinking, strict=True)
        ]
        verdicts = judged(self.judge, [completion for _, completion in flat], items, [turns for _, turns in texts])
        responses = iter(
            Response(completion, text, verdict, turns)
            for (_, completion), (text, turns), verdict in zip(flat, texts, verdicts, strict=True)
        )
        return [
            Group(name, prompt, tuple(next(responses) for _ in completions), version)
            for name, prompt, completions in zip(names, prompts, sampled, strict=True)
        ]


def judged(
    judge: Judge, completions: Sequence[Completion], items: Sequence[Item], turns: Sequence[Sequence[TurnText]]
) -> list[Verdict]:
    """Judge completions, decoded as `items` with their `turns`, in order.

    The verdict is INFRA where the engine aborted one, and an environment's where it has judged one. Of a response whose
    environment leaves that to the judge, the judge is given the last turn.
    """
    known = [_known_verdict(completion) for completion in completions]
    pairs = [(_last_turn(item, c, own), c) for item, c, own in zip(items, completions, turns, strict=True)]
    cut = [replace(item, truncated=True) if c.finish_reason is FinishReason.LENGTH else item for item, c in pairs]
    verdicts = iter(judge.verdicts([item for item, verdict in zip(cut, known, strict=True) if verdict is None]))
    return [next(verdicts) if verdict is None else verdict for verdict in known]


def _last_turn(item: Item, completion: Completion, turns: Sequence[TurnText]) -> Item:
    if not turns or completion.episode is None or completion.episode.verdict is not None:
        return item
    last = turns[-1]
    text = item.text[last.text_start : last.text_end]
    return replace(item, text=text, tokens=item.tokens[last.start : last.end])


def _known_verdict(completion: Completion) -> Verdict | None:
    if completion.finish_reason is FinishReason.ABORT:
        return Verdict(Outcome.INFRA, 0.0, detail=completion.cause or "the engine aborted the response")
    return None if completion.episode is None else completion.episode.verdict


def episode_of(answer: TaskAnswer) -> EnvironmentAnswer | None:
    """Return the environment of a problem's responses; None where they have one turn."""
    return answer if isinstance(answer, EnvironmentAnswer) else None


def response_seed(run_seed: int, prompt_id: str, epoch: int, index: int) -> int:
    """Hash the response's identity to a seed in [0, 2^63); a resumed run samples it with the same seed."""
    identity = repr((run_seed, prompt_id, epoch, index)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1
