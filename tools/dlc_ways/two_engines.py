"""DLC with an engine for each network: every token costs a round trip to both, with log-probs of the whole vocabulary.

The client subtracts and draws. Both engines keep their prefix caches, so a round trip computes one token, and both
are asked at the same time: this is the way at its best.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from dlc_ways.work import Responses, Way, Work, post
from megasharp.ops.uniform import (
    seeds_to_int64,
    uniforms,
)
from megasharp.rollout.sglang.client.api import EngineApi


def two_engines(policy: EngineApi, memory: EngineApi, vocabulary: int, mu: float) -> Way:
    """The way through these two engines."""
    everything = list(range(vocabulary))

    def log_probs(api: EngineApi, prefixes: list[list[int]]) -> Tensor:
        body = {
            "input_ids": prefixes,
            "sampling_params": [{"max_new_tokens": 1, "temperature": 1.0}] * len(prefixes),
            "return_logprob": True,
            "token_ids_logprob": everything,
        }
        rows = [answer["meta_info"]["output_token_ids_logprobs"][0] for answer in post(api, body)]
        return torch.tensor([[entry[0] for entry in row] for row in rows])

    def sample(work: Work) -> Responses:
        prefixes = [list(prompt) for prompt in work.prompts]
        seed_S = seeds_to_int64(work.seeds)
        with ThreadPoolExecutor(2) as pool:
            for position in range(work.new_tokens):
                policy_SV, memory_SV = pool.map(lambda api: log_probs(api, prefixes), (policy, memory))
                drawn_S = _draw(policy_SV - mu * memory_SV, uniforms(seed_S, torch.full_like(seed_S, position)))
                for prefix, token in zip(prefixes, drawn_S.tolist(), strict=True):
                    prefix.append(token)
        return [prefix[-work.new_tokens :] for prefix in prefixes]

    return sample


def _draw(scores_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """int64 [S]: from each row's softmax, the token at that share of its cumulative sum, as our engines draw."""
    cumulative_SV = scores_SV.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(cumulative_SV, (uniform_S * cumulative_SV[:, -1])[:, None], right=True).squeeze(1)
