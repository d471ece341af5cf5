"""From prompts to verified groups: seeds, sampling, decoding, verification, and what each took."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megasharp.errors import UserError, one_line
from megasharp.protocols import Engine
from megasharp.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Group,
    Outcome,
    Prompt,
    Response,
    SamplingParams,
    TaskAnswer,
    Verdict,
)

Verifier = Callable[[str, TaskAnswer], Verdict]
DecodeBatch = Callable[[Sequence[Sequence[int]]], Sequence[str]]


class MemoryUse(Protocol):
    """What sampling does with a memory network: `SamplingParams.memory_mu` and `SamplingParams.plausible`."""

    @property
    def mu(self) -> float: ...

    @property
    def plausible(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class RolloutTiming:
    """Seconds of one `collect`: sampling, then everything from text to verdict."""

    rollout_seconds: float = 0.0
    reward_seconds: float = 0.0


class Rollouts:
    """Collects groups through any engine. `timing` is that of the latest `collect`.

    `verifiers` is by task. `decode` turns lists of token ids into texts, as a tokenizer's batch decoding with
    special tokens left out.
    """

    def __init__(
        self,
        engine: Engine,
        verifiers: Mapping[str, Verifier],
        decode: DecodeBatch,
        sampling: SamplingParams,
        responses_per_prompt: int,
        seed: int,
    ) -> None:
        self._engine = engine
        self._verifiers = verifiers
        self._decode = decode
        self._sampling = sampling
        self._responses_per_prompt = responses_per_prompt
        self._seed = seed
        self.timing = RolloutTiming()

    def collect(self, prompts: Sequence[Prompt], step: int, first: int, memory: MemoryUse | None) -> list[Group]:
        """One group per prompt, in order, with ids like `step7-0` numbered from `first`.

        `memory` says how much of the memory network's logits is subtracted; None samples from the policy alone.

        Raises UserError for a prompt whose task has no verifier. A verifier's exception is an ERROR verdict.
        """
        self._check_tasks(prompts)
        started = time.perf_counter()
        version = self._engine.version
        requests = [GenerateRequest(prompt.tokens, self._seeds(prompt)) for prompt in prompts]
        sampled = self._engine.generate(requests, _with_memory(self._sampling, memory))
        generated = time.perf_counter()
        texts = iter(self._decode([c.tokens.tolist() for completions in sampled for c in completions]))
        groups = []
        for number, (prompt, completions) in enumerate(zip(prompts, sampled, strict=True)):
            responses = tuple(self._response(prompt, completion, next(texts)) for completion in completions)
            groups.append(Group(f"step{step}-{first + number}", prompt, responses, version))
        self.timing = RolloutTiming(generated - started, time.perf_counter() - generated)
        return groups

    def _check_tasks(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if prompt.task not in self._verifiers:
                known = ", ".join(sorted(self._verifiers)) or "none"
                raise UserError(
                    f"{prompt.source}: prompt {prompt.id} is of task {prompt.task}, which has no verifier; "
                    f"known tasks: {known}"
                )

    def _seeds(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(
            response_seed(self._seed, prompt.id, prompt.epoch, index) for index in range(self._responses_per_prompt)
        )

    def _response(self, prompt: Prompt, completion: Completion, text: str) -> Response:
        return Response(completion, text, judge(self._verifiers[prompt.task], completion, text, prompt.answer))


def _with_memory(sampling: SamplingParams, memory: MemoryUse | None) -> SamplingParams:
    return sampling if memory is None else replace(sampling, memory_mu=memory.mu, plausible=memory.plausible)


def judge(verifier: Verifier, completion: Completion, text: str, answer: TaskAnswer) -> Verdict:
    """The verdict on a completion that reads `text`; INFRA where the engine cut it off."""
    if completion.finish_reason is FinishReason.ABORT:
        return Verdict(Outcome.INFRA, 0.0, detail="the engine aborted the response")
    return verify(verifier, text, answer)


def verify(verifier: Verifier, text: str, answer: TaskAnswer) -> Verdict:
    """The verifier's verdict; ERROR with reward 0 and the exception's name and text where it raised one."""
    try:
        return verifier(text, answer)
    except Exception as error:
        return Verdict(Outcome.ERROR, 0.0, detail=f"{type(error).__name__}: {one_line(error)}")


def response_seed(run_seed: int, prompt_id: str, epoch: int, index: int) -> int:
    """A seed in [0, 2^63) that names the response, not when it is sampled: a resumed run repeats it."""
    identity = repr((run_seed, prompt_id, epoch, index)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1
