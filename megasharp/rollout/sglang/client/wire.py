"""Generation on the wire: SGLang's request as JSON, and its answer as Completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams, VersionSpan

Json = Mapping[str, Any]
# What SGLang calls the weights that an engine started with.
_INITIAL_VERSION = "default"
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class MalformedAnswer(Exception):
    """An engine answered with something that is not what its API promises."""


def generate_body(request: GenerateRequest, sampling: SamplingParams, ids: Sequence[str]) -> dict[str, Any]:
    """The body of POST /generate for one sample of a prompt for each seed; `ids` name them for an abort.

    Seeds count only where the engine is in its deterministic mode. Tokens begun earlier are, to the engine, the end of
    the prompt; it learns their number, so that it draws what it would have drawn without the interruption.
    """
    begun = request.begun or ((),) * len(request.seeds)
    return {
        "rid": list(ids),
        "input_ids": [[*request.tokens, *tokens] for tokens in begun],
        "sampling_params": [
            {**_sampling(sampling, len(tokens)), "sampling_seed": seed}
            for seed, tokens in zip(request.seeds, begun, strict=True)
        ],
        "return_logprob": True,
        "stream": False,
    }


def _sampling(sampling: SamplingParams, begun: int) -> dict[str, Any]:
    """SGLang's names; its top_k is -1 where ours is 0. Custom parameters are numbers only."""
    fields: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens - begun,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
    }
    custom: dict[str, float] = {"begun": begun} if begun else {}
    if sampling.record_top is not None:
        custom["candidates"] = sampling.record_top
    if sampling.memory_mu is not None:
        custom["mu"] = float(sampling.memory_mu)
        if sampling.plausible is not None:
            forms = {"plausible_min_p": sampling.plausible.min_p, "plausible_top_k": sampling.plausible.top_k}
            custom |= {name: value for name, value in forms.items() if value is not None}
    return {**fields, "custom_params": custom} if custom else fields


def completions(answer: object, seeds: Sequence[int], sampling: SamplingParams) -> list[Completion]:
    """Parse the answer to `generate_body`, in the order of `seeds`.

    Raises MalformedAnswer for an answer that is none, UserError where a network's log-probs are not finite.
    """
    if not isinstance(answer, list) or len(answer) != len(seeds):
        raise MalformedAnswer(f"asked for {len(seeds)} samples, got {str(answer)[:200]}")
    try:
        return [_completion(item, seed, sampling) for item, seed in zip(answer, seeds, strict=True)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise MalformedAnswer(f"{type(error).__name__}: {error}") from error


def _completion(item: Json, seed: int, sampling: SamplingParams) -> Completion:
    meta: Json = item["meta_info"]
    tokens = torch.tensor(item["output_ids"], dtype=torch.int64)
    count = tokens.numel()
    finish = _FINISH[meta["finish_reason"]["type"]]
    if finish is FinishReason.ABORT and (not count or _needed(sampling) - meta.keys()):
        # Aborted while it waited to be computed, or computed again: SGLang then answers without our numbers.
        return Completion.unsampled(seed, sampling)
    standard = [pair[0] for pair in meta.get("output_token_logprobs") or []]
    spans = tuple(_spans(meta, count))
    version = spans[-1].version if spans else -1
    with_memory = sampling.memory_mu is not None
    truncated = sampling.top_p < 1.0 or sampling.top_k > 0
    # SGLang's own log-prob is the policy's at the temperature: the sampler's only where nothing changed the logits.
    sampler = meta["sampler_logprob"] if with_memory or truncated else meta.get("sampler_logprob", standard)
    policy = meta["policy_logprob"] if with_memory else meta.get("policy_logprob", standard)
    return Completion(
        tokens=tokens,
        policy_logp=_logp("the policy's", policy, count, version),
        memory_logp=_logp("the memory network's", meta["memory_logprob"], count, version) if with_memory else None,
        sampler_logp=_logp("the sampler's", sampler, count, version),
        version_spans=spans,
        finish_reason=finish,
        seed=seed,
        argmax_moved=_numbers(meta["argmax_moved"], count).bool() if with_memory else None,
        calibration_kl=_numbers(meta["calibration_kl"], count) if with_memory else None,
        entropy=None if sampling.record_top is None else _numbers(meta["policy_entropy"], count),
        top_logp=None if sampling.record_top is None else _candidates(meta, count, sampling.record_top),
    )


def _needed(sampling: SamplingParams) -> set[str]:
    """Name the numbers that an answer must hold for each token beyond SGLang's own."""
    candidates = set() if sampling.record_top is None else {"policy_entropy"}
    if sampling.memory_mu is not None:
        return candidates | {"sampler_logprob", "policy_logprob", "memory_logprob", "argmax_moved", "calibration_kl"}
    return candidates | ({"sampler_logprob"} if sampling.top_p < 1.0 or sampling.top_k > 0 else set())


def _logp(whose: str, values: Sequence[float | None], count: int, version: int) -> Tensor:
    """Float32 [T]; JSON has no NaN, so SGLang sends null for it."""
    if len(values) != count:
        raise ValueError(f"{count} tokens with {len(values)} of {whose} log-probs")
    if any(value is None or not math.isfinite(value) for value in values):
        raise UserError(
            f"{whose} logits are not finite (weights version {version}); "
            "resume from an earlier checkpoint with a lower learning rate"
        )
    return torch.tensor(values, dtype=torch.float32)


def _numbers(values: Sequence[float], count: int) -> Tensor:
    """Float32 [T]."""
    if len(values) != count:
        raise ValueError(f"{count} tokens with {len(values)} numbers of how they were drawn")
    return torch.tensor(values, dtype=torch.float32)


def _candidates(meta: Json, count: int, most: int) -> Tensor:
    """Float32 [T, N]; N is smaller than `most` where the vocabulary is."""
    names = [name for rank in range(1, most + 1) if (name := f"candidate_logprob_{rank}") in meta]
    return torch.stack([_numbers(meta[name], count) for name in names], dim=1)


def _spans(meta: Json, count: int) -> list[VersionSpan]:
    """Read which version sampled which tokens; a span past the last token is cut."""
    named = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
    spans = [VersionSpan(version_number(s["version"]), int(s["start"]), min(int(s["end"]), count)) for s in named]
    return [span for span in spans if span.start < span.end]


def version_number(name: object) -> int:
    """The weights' version as we count it; -1 for those an engine started with. Raises ValueError for other names."""
    return -1 if name == _INITIAL_VERSION else int(str(name))
