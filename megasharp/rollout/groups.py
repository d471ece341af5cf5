"""From a prompt to its request, and from completions to verified groups: seeds, decoding, verdicts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megasharp.errors import UserError, one_line
from megasharp.rollout.order import Order
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


@dataclass(frozen=True, slots=True)
class GroupMaker:
    """Makes requests of prompts and groups of completions.

    `verifiers` is by task. `decode` turns lists of token ids into texts, as a tokenizer's batch decoding with
    special tokens left out. `seed` is the run's.
    """

    verifiers: Mapping[str, Verifier]
    decode: DecodeBatch
    sampling: SamplingParams
    responses_per_prompt: int
    seed: int

    def request(self, prompt: Prompt) -> GenerateRequest:
        """All responses of a prompt. Raises UserError for a prompt whose task has no verifier."""
        if prompt.task not in self.verifiers:
            known = ", ".join(sorted(self.verifiers)) or "none"
            raise UserError(
                f"{prompt.source}: prompt {prompt.id} is of task {prompt.task}, which has no verifier; "
                f"known tasks: {known}"
            )
        indices = range(self.responses_per_prompt)
        return GenerateRequest(
            prompt.tokens, tuple(response_seed(self.seed, prompt.id, prompt.epoch, index) for index in indices)
        )

    def sampling_for(self, order: Order) -> SamplingParams:
        """How a step's responses are drawn: how long they may be, and how much of a memory network is subtracted."""
        sampling = replace(self.sampling, max_tokens=order.max_tokens or self.sampling.max_tokens)
        if order.memory is None:
            return sampling
        return replace(sampling, memory_mu=order.memory.mu, plausible=order.memory.plausible)

    def groups(
        self, names: Sequence[str], prompts: Sequence[Prompt], sampled: Sequence[Sequence[Completion]], version: int
    ) -> list[Group]:
        """One verified group per prompt, in order. A verifier's exception is an ERROR verdict."""
        texts = iter(self.decode([c.tokens.tolist() for completions in sampled for c in completions]))
        groups = []
        for name, prompt, completions in zip(names, prompts, sampled, strict=True):
            responses = tuple(self._response(prompt, completion, next(texts)) for completion in completions)
            groups.append(Group(name, prompt, responses, version))
        return groups

    def _response(self, prompt: Prompt, completion: Completion, text: str) -> Response:
        return Response(completion, text, judge(self.verifiers[prompt.task], completion, text, prompt.answer))


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
