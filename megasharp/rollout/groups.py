"""From a prompt to its request, and from completions to verified groups: seeds, decoding, verdicts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megasharp.errors import UserError
from megasharp.rewards.judge import Item, Judge
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
    Verdict,
)

DecodeBatch = Callable[[Sequence[Sequence[int]]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class GroupMaker:
    """Makes requests of prompts and groups of completions.

    `decode` turns lists of token ids into texts, as a tokenizer's batch decoding with
    special tokens left out. `seed` is the run's.
    """

    judge: Judge
    decode: DecodeBatch
    sampling: SamplingParams
    responses_per_prompt: int
    seed: int

    def request(self, prompt: Prompt) -> GenerateRequest:
        """All responses of a prompt. Raises UserError for a prompt whose task has no verifier."""
        if prompt.task not in self.judge.tasks:
            known = ", ".join(sorted(self.judge.tasks)) or "none"
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
        flat = [(prompt, completion) for prompt, some in zip(prompts, sampled, strict=True) for completion in some]
        texts = self.decode([completion.tokens.tolist() for _, completion in flat])
        items = [Item(prompt.task, text, prompt.answer) for (prompt, _), text in zip(flat, texts, strict=True)]
        verdicts = judged(self.judge, [completion for _, completion in flat], items)
        responses = iter(
            Response(completion, text, verdict)
            for (_, completion), text, verdict in zip(flat, texts, verdicts, strict=True)
        )
        return [
            Group(name, prompt, tuple(next(responses) for _ in completions), version)
            for name, prompt, completions in zip(names, prompts, sampled, strict=True)
        ]


def judged(judge: Judge, completions: Sequence[Completion], items: Sequence[Item]) -> list[Verdict]:
    """The verdicts on completions that read as `items` do; INFRA where the engine cut one off."""
    whole = [completion.finish_reason is not FinishReason.ABORT for completion in completions]
    verdicts = iter(judge.verdicts([item for item, is_whole in zip(items, whole, strict=True) if is_whole]))
    aborted = Verdict(Outcome.INFRA, 0.0, detail="the engine aborted the response")
    return [next(verdicts) if is_whole else aborted for is_whole in whole]


def response_seed(run_seed: int, prompt_id: str, epoch: int, index: int) -> int:
    """A seed in [0, 2^63) that names the response, not when it is sampled: a resumed run repeats it."""
    identity = repr((run_seed, prompt_id, epoch, index)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1
