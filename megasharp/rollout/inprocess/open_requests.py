"""Requests that an engine samples: each with its sampling, handed out when the last of its samples has ended.

Every kind of sampling has a decode loop of its own; together they have as many rows as may be sampled at once, and
samples begin in the order in which they were asked for. So a pass of another kind begins in the rows that the last one
leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Generic

import torch
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams, VersionSpan
from megasharp.rollout.inprocess.decode_loop import Cache, DecodeLoop, Sample
from megasharp.rollout.inprocess.decode_loop import Ended as EndedSamples
from megasharp.rollout.inprocess.generation import Draw, split
from megasharp.rollout.streaming import Ended


@dataclass(slots=True, eq=False)
class _Request:
    """A request's place, and its completions so far, by index; `missing` have not ended."""

    place: int
    completions: list[Completion | None]
    missing: int


class OpenRequests(Generic[Cache]):
    """Requests on their way. `new_loop` makes the loop of a kind of sampling; `version` is that of its weights."""

    def __init__(self, new_loop: Callable[[SamplingParams], DecodeLoop[Cache]], version: int, most_rows: int) -> None:
        self._new_loop = new_loop
        self._version = version
        self._most_rows = most_rows
        self._loops: dict[SamplingParams, DecodeLoop[Cache]] = {}
        self._count = 0
        # By the numbers of samples: their requests, and their indices in these.
        self._of_sample: dict[int, tuple[_Request, int]] = {}
        self._without_samples: list[Ended] = []

    @property
    def done(self) -> bool:
        """Return whether every request was handed out."""
        return not self._of_sample and not self._without_samples

    def add(self, place: int, request: GenerateRequest, sampling: SamplingParams) -> None:
        """Sample a request of the caller's number `place`, after those that were added before."""
        if not request.seeds:
            self._without_samples.append((place, []))
            return
        whole = _Request(place, [None] * len(request.seeds), len(request.seeds))
        limit = request.under(sampling).max_tokens
        begun = request.begun or ((),) * len(request.seeds)
        samples = [
            Sample(self._count + index, seed, limit, len(before))
            for index, (seed, before) in enumerate(zip(request.seeds, begun, strict=True))
        ]
        self._count += len(samples)
        self._of_sample |= {sample.number: (whole, index) for index, sample in enumerate(samples)}
        # Limits are the samples' own.
        kind = replace(sampling, max_tokens=1)
        if kind not in self._loops:
            self._loops[kind] = self._new_loop(kind)
        # Tokens that a response has already are read with its prompt.
        for before, some in groupby(zip(begun, samples, strict=True), itemgetter(0)):
            self._loops[kind].add((*request.tokens, *before), [sample for _, sample in some])

    def advance(self) -> list[Ended]:
        """Draw a token of every sample that has a row; returns the requests that are whole.

        Raises UserError where log-probs of a sample that ended are not finite.
        """
        whole, self._without_samples = self._without_samples, []
        with torch.inference_mode():
            while any(self._begins(loop) for loop in self._loops.values()):
                pass
            found = [(kind, ended) for kind, loop in self._loops.items() if (ended := loop.advance()) is not None]
        for kind, ended in found:
            whole += self._taken(ended)
            if self._loops[kind].empty:
                del self._loops[kind]
        return whole

    def _begins(self, loop: DecodeLoop[Cache]) -> bool:
        """Give rows to samples of one kind, until those of another come first; return whether any has begun."""
        others = [other for other in self._loops.values() if other is not loop]
        rows = self._most_rows - sum(other.live for other in others)
        return loop.begin(rows, min((other.next for other in others), default=math.inf))

    def _taken(self, ended: EndedSamples) -> list[Ended]:
        _check_finite(ended.drawn, self._version)
        # Copied outside of inference mode: training may save them for a backward pass.
        parts = split(ended.drawn.apply(Tensor.clone), ended.lengths)
        whole: list[Ended] = []
        columns = (ended.samples, parts, ended.lengths, ended.stopped, ended.prompt_experts)
        for sample, drawn, length, stopped, prompt_experts in zip(*columns, strict=True):
            request, index = self._of_sample.pop(sample.number)
            completion = self._completion(sample, drawn, length, stopped)
            if prompt_experts is not None and drawn.experts_SLK is not None:
                completion = replace(completion, experts=torch.cat([prompt_experts, drawn.experts_SLK]))
            request.completions[index] = completion
            request.missing -= 1
            if not request.missing:
                whole.append((request.place, [each for each in request.completions if each is not None]))
        return whole

    def _completion(self, sample: Sample, drawn: Draw, length: int, stopped: bool) -> Completion:
        memory, candidates = drawn.memory, drawn.candidates
        return Completion(
            tokens=drawn.tokens_S,
            sampler_logp=drawn.sampler_logp_S,
            policy_logp=drawn.policy_logp_S,
            memory_logp=None if memory is None else memory.logp_S,
            version_spans=(VersionSpan(self._version, 0, length),),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            seed=sample.seed,
            argmax_moved=None if memory is None else memory.argmax_moved_S,
            calibration_kl=None if memory is None else memory.kl_S,
            entropy=None if candidates is None else candidates.entropy_S,
            top_logp=None if candidates is None else candidates.top_logp_SN,
        )


def _check_finite(drawn: Draw, version: int) -> None:
    """Raise UserError where log-probs are not finite.

    The networks come first: the sampler's are not finite wherever one network's are not.
    """
    advice = f"(weights version {version}); resume from an earlier checkpoint with a lower"
    if not bool(drawn.policy_logp_S.isfinite().all()):
        raise UserError(f"the policy's logits are not finite {advice} learning rate")
    if drawn.memory is not None and not bool(drawn.memory.logp_S.isfinite().all()):
        raise UserError(f"the memory network's logits are not finite {advice} learning rate of the memory")
    if not bool(drawn.sampler_logp_S.isfinite().all()):
        raise UserError("policy logits - sampling.memory_mu * memory logits are not finite; lower memory_mu")
