"""The in-process engine: the engine protocol over a policy and, if wanted, a memory network, on one device.

Requests are served in batches of at most `max_batch` samples, prompts of like length together, so the
cache's memory is bounded; a completion depends on its prompt, its seed and the weights (up to rounding), not
on its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megasharp.convert.hf_folder import read_config
from megasharp.errors import UserError
from megasharp.rollout.inprocess.candidates import Candidates, candidates_of, joined
from megasharp.rollout.inprocess.composite import Composite
from megasharp.rollout.inprocess.generation import Samples, generate_batch
from megasharp.rollout.inprocess.sampling import BLOCK_ELEMENTS, Draw, check_sampling
from megasharp.rollout.inprocess.vocabulary import check_same_vocabulary
from megasharp.types import Completion, FinishReason, GenerateRequest, SamplingParams, VersionSpan


@dataclass(frozen=True, slots=True)
class _Sample:
    """One completion to make: sample `index` of request `request`."""

    request: int
    index: int
    seed: int


class InProcessEngine:
    """Samples from the weights of any dense family; satisfies `megasharp.protocols.Engine`.

    `memory_folder` adds a memory network: where `SamplingParams.memory_mu` is given, that share of its logits is
    subtracted and its log-probs are recorded. The constructor reads no weights, only config.json (of two folders,
    tokenizer.json too); the first `load_weights` brings them.
    Raises UserError when an architecture is not supported, or the two networks' vocabularies differ.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_batch: int = 512,
        memory_folder: Path | None = None,
    ) -> None:
        assert max_batch >= 1, max_batch
        self._policy = read_config(model_folder)[2]
        self._memory = read_config(memory_folder)[2] if memory_folder else None
        if memory_folder and self._memory:
            check_same_vocabulary(model_folder, self._policy, memory_folder, self._memory)
        self._model: Composite | None = Composite(self._policy, self._memory, dtype, device)
        self._max_batch = max_batch
        self._version = -1
        self._complete = False

    @property
    def version(self) -> int:
        """The policy version last loaded whole; -1 before the first."""
        return self._version

    def healthy(self) -> bool:
        """Whether the weights are whole: not before the first load, after a failed one, or after `close`."""
        return self._complete

    def close(self) -> None:
        """Free the weights."""
        self._complete = False
        self._model = None

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights of policy version `version` into place, and all of the memory network's where there is one.

        The memory's names begin with `protocols.MEMORY_PREFIX`.
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
        """What the policy alone, at temperature 1, holds likely at each token of a given response; on the CPU.

        Raises UserError as `generate` does for the prompt.
        """
        if self._model is None or not self._complete:
            raise RuntimeError("the in-process engine holds no complete weights; call load_weights first")
        self._check_prompt((*prompt, *response), 0)
        rows = max(1, BLOCK_ELEMENTS // self._policy.vocab)
        given = torch.tensor(list(response), dtype=torch.int64)
        with torch.inference_mode():
            logits = self._model.read((*prompt, *response), len(prompt), rows)
            blocks = zip(logits, torch.split(given, rows), strict=True)
            return joined([candidates_of(block_TV.cpu(), given_T, n) for block_TV, given_T in blocks])

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """Sample every request; the outer list follows `requests`, the inner one each request's seeds.

        Raises UserError for an empty or too long prompt, a token outside the vocabulary, bad parameters, or logits that
        are not finite.
        """
        if self._model is None or not self._complete:
            raise RuntimeError("the in-process engine holds no complete weights; call load_weights first")
        check_sampling(sampling)
        if sampling.memory_mu is not None and self._memory is None:
            raise UserError(
                f"sampling.memory_mu is {sampling.memory_mu}, but the engine holds no memory network; "
                "leave it out or give the memory network's folder"
            )
        for request in requests:
            self._check_prompt(request.tokens, sampling.max_tokens)
        done: dict[tuple[int, int], Completion] = {}
        for batch in self._batches(requests):
            completions = self._serve(self._model, requests, batch, sampling)
            done.update(((s.request, s.index), c) for s, c in zip(batch, completions, strict=True))
        return [[done[number, index] for index in range(len(request.seeds))] for number, request in enumerate(requests)]

    def _check_prompt(self, tokens: tuple[int, ...], max_tokens: int) -> None:
        if not tokens:
            raise UserError("a prompt is empty; the engine needs at least one token: check the template")
        for network, which in ((self._policy, "model's"), (self._memory, "memory network's")):
            if network and len(tokens) + max_tokens > network.max_positions:
                raise UserError(
                    f"a prompt of {len(tokens)} tokens and sampling.max_tokens {max_tokens} exceed the {which} "
                    f"max_position_embeddings {network.max_positions}; shorten one of them"
                )
        if not 0 <= min(tokens) <= max(tokens) < self._policy.vocab:
            raise UserError(
                f"a prompt holds token ids {min(tokens)}..{max(tokens)}, but the model's vocabulary has "
                f"{self._policy.vocab}; check that the tokenizer belongs to the model"
            )

    def _batches(self, requests: Sequence[GenerateRequest]) -> Iterator[list[_Sample]]:
        by_length = sorted(range(len(requests)), key=lambda number: len(requests[number].tokens))
        samples = [
            _Sample(number, index, seed) for number in by_length for index, seed in enumerate(requests[number].seeds)
        ]
        for start in range(0, len(samples), self._max_batch):
            yield samples[start : start + self._max_batch]

    def _serve(
        self,
        model: Composite,
        requests: Sequence[GenerateRequest],
        batch: Sequence[_Sample],
        sampling: SamplingParams,
    ) -> list[Completion]:
        prompts = {requests[sample.request].tokens: 0 for sample in batch}
        number_of = {tokens: number for number, tokens in enumerate(prompts)}
        rows = [number_of[requests[sample.request].tokens] for sample in batch]
        seeds = [sample.seed for sample in batch]
        used = model if sampling.memory_mu is not None else model.policy_alone()
        with torch.inference_mode():
            samples = generate_batch(used, list(prompts), rows, seeds, sampling)
        return self._completions(samples, seeds)

    def _completions(self, samples: Samples, seeds: Sequence[int]) -> list[Completion]:
        """Copies made outside inference mode: training may save them for a backward pass."""
        self._check_finite(samples.drawn)
        drawn = samples.drawn.apply(Tensor.cpu)
        return [
            self._completion(drawn.apply(lambda values: values[row, :length].clone()), length, stopped, seed)  # noqa: B023
            for row, (length, stopped, seed) in enumerate(
                zip(samples.lengths_S.tolist(), samples.stopped_S.tolist(), seeds, strict=True)
            )
        ]

    def _completion(self, drawn: Draw, length: int, stopped: bool, seed: int) -> Completion:
        memory, candidates = drawn.memory, drawn.candidates
        return Completion(
            tokens=drawn.tokens_S,
            sampler_logp=drawn.sampler_logp_S,
            policy_logp=drawn.policy_logp_S,
            memory_logp=None if memory is None else memory.logp_S,
            version_spans=(VersionSpan(self._version, 0, length),),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            seed=seed,
            argmax_moved=None if memory is None else memory.argmax_moved_S,
            calibration_kl=None if memory is None else memory.kl_S,
            entropy=None if candidates is None else candidates.entropy_S,
            top_logp=None if candidates is None else candidates.top_logp_SN,
        )

    def _check_finite(self, drawn: Draw) -> None:
        """The networks before the sampler: it is not finite wherever one of them is not."""
        advice = f"(weights version {self._version}); resume from an earlier checkpoint with a lower"
        if not bool(drawn.policy_logp_S.isfinite().all()):
            raise UserError(f"the policy's logits are not finite {advice} learning rate")
        if drawn.memory is not None and not bool(drawn.memory.logp_S.isfinite().all()):
            raise UserError(f"the memory network's logits are not finite {advice} learning rate of the memory")
        if not bool(drawn.sampler_logp_S.isfinite().all()):
            raise UserError("policy logits - sampling.memory_mu * memory logits are not finite; lower memory_mu")
