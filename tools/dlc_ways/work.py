"""What every way is asked for: responses of one length to prompts of one length, each with a seed."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from megasharp.common.records import (
    GenerateRequest,
    SamplingParams,
)
from megasharp.rollout.sglang.client.api import EngineApi
from megasharp.rollout.sglang.client.fleet import Fleet

_LIMIT_S = 600.0

Responses = list[list[int]]


@dataclass(frozen=True, slots=True)
class Work:
    """`new_tokens` tokens after each of `prompts`, at temperature 1; `seeds` has one for each prompt."""

    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    new_tokens: int


# Does the work and returns the response tokens, in the prompts' order.
Way = Callable[[Work], Responses]


def make_work(batch: int, prompt_tokens: int, new_tokens: int, vocabulary: int, seed: int) -> Work:
    """Random prompts; another seed has others, so that no engine has them in its cache."""
    random = Random(seed)
    prompts = tuple(tuple(random.randrange(vocabulary) for _ in range(prompt_tokens)) for _ in range(batch))
    return Work(prompts, tuple(random.getrandbits(62) for _ in range(batch)), new_tokens)


def through_fleet(fleet: Fleet, mu: float | None) -> Way:
    """One engine, as a run asks it: the policy alone (None), or policy and memory in one engine."""

    def sample(work: Work) -> Responses:
        sampling = SamplingParams(work.new_tokens, memory_mu=mu)
        requests = [GenerateRequest(prompt, (seed,)) for prompt, seed in zip(work.prompts, work.seeds, strict=True)]
        return [completions[0].tokens.tolist() for completions in fleet.generate(requests, sampling)]

    return sample


def post(api: EngineApi, body: Mapping[str, object]) -> Any:
    """The answer of POST /generate, for requests that the product's own client does not make."""
    request = urllib.request.Request(f"http://{api.host}:{api.port}/generate", json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {api.key}")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:
        return json.load(response)
