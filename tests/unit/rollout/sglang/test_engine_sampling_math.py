"""The engine's arithmetic of drawing against the in-process engine's, which works in float64 from log-probs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.common.records import GenerateRequest, Plausible, SamplingParams
from megasharp.ops.uniform import uniforms
from megasharp.rollout.inprocess.generation import Logits
from megasharp.rollout.inprocess.generation import draw as draw_inprocess
from megasharp.rollout.sglang.client.api import generate_body
from megasharp.rollout.sglang.engine.requests import Columns, check_request, columns_of
from megasharp.rollout.sglang.engine.sampling_math import draw, logp_at, subtract_memory, truncate

ROWS, VOCABULARY = 200, 40


def request(custom: dict[str, float] | None = None, seed: int | None = None, prompt: int = 3) -> Any:
    params = SimpleNamespace(custom_params=custom, sampling_seed=seed)
    return SimpleNamespace(sampling_params=params, origin_input_ids=[0] * prompt)


def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    policy = 3 * torch.randn(ROWS, VOCABULARY, generator=generator)
    return policy, 3 * torch.randn(ROWS, VOCABULARY, generator=generator)


@each_case(
    "sampling",
    [
        SamplingParams(1, temperature=0.7, memory_mu=0.4),
        SamplingParams(1, temperature=1.3, memory_mu=0.9, plausible=Plausible(min_p=0.1)),
        SamplingParams(1, memory_mu=0.5, top_p=0.8),
        SamplingParams(1, temperature=1.2, memory_mu=0.5, top_p=0.9, top_k=12, min_p=0.06),
        SamplingParams(1, temperature=0.6, memory_mu=0.2, top_k=7, top_p=0.6, plausible=Plausible(min_p=0.05)),
        SamplingParams(1, memory_mu=0.0, plausible=Plausible(min_p=1.0)),
        SamplingParams(1, temperature=1.3, memory_mu=0.9, plausible=Plausible(top_k=5)),
        SamplingParams(1, temperature=0.6, memory_mu=0.2, top_k=7, top_p=0.6, plausible=Plausible(top_k=9)),
        SamplingParams(1, memory_mu=0.4, plausible=Plausible(top_k=10**6)),
    ],
)
def test_same_tokens_and_log_probs_as_in_process(sampling: SamplingParams) -> None:
    policy, memory = logits()
    seeds = torch.arange(ROWS)
    want = draw_inprocess(Logits(policy, memory), seeds, 5, sampling)
    [asked] = generate_body(GenerateRequest((1,), (0,)), sampling, ("a",))["sampling_params"]
    custom = asked["custom_params"]
    check_request(custom, has_memory=True)
    columns = columns_of([request(custom)] * ROWS, "cpu")
    temperature = torch.full((ROWS, 1), sampling.temperature)
    calibrated = subtract_memory(policy, memory, columns, temperature)
    probs = (calibrated / temperature).softmax(-1)
    top_k = torch.full((ROWS,), sampling.top_k or VOCABULARY)
    top_p, min_p = torch.full((ROWS,), sampling.top_p), torch.full((ROWS,), asked.get("min_p", 0.0))
    kept, tokens_by_rank = truncate(probs, top_k, top_p, min_p)
    if sampling.truncates:
        ranks = draw(kept, uniforms(seeds, 5))
        tokens = tokens_by_rank.gather(1, ranks[:, None])[:, 0]
        logp = kept.gather(1, ranks[:, None])[:, 0].log() - kept.sum(-1).log()
    else:
        tokens = draw(probs, uniforms(seeds, 5))
        logp = probs.gather(1, tokens[:, None])[:, 0].log()
    assert tokens.equal(want.tokens_S)
    torch.testing.assert_close(logp, want.sampler_logp_S, atol=2e-6, rtol=0)
    torch.testing.assert_close(logp_at(policy, tokens, temperature[:, 0]), want.policy_logp_S, atol=2e-6, rtol=0)
    assert want.memory is not None
    torch.testing.assert_close(logp_at(memory, tokens, temperature[:, 0]), want.memory.logp_S, atol=2e-6, rtol=0)


def test_draws_without_seeds_follow_the_weights() -> None:
    weights = torch.tensor([[0.5, 0.0, 0.25, 0.25]]).repeat(20_000, 1)
    counts = torch.bincount(draw(weights, None), minlength=4) / 20_000
    assert counts[1] == 0
    torch.testing.assert_close(counts, weights[0], atol=0.02, rtol=0)


def test_min_p_cuts_after_the_others() -> None:
    kept, tokens = truncate(
        torch.tensor([[0.1, 0.6, 0.3]]), torch.tensor([3]), torch.tensor([1.0]), torch.tensor([0.4])
    )
    assert tokens.tolist() == [[1, 2, 0]]
    torch.testing.assert_close(kept, torch.tensor([[0.6, 0.3, 0.0]]))


def test_columns_follow_their_requests() -> None:
    first = columns_of([request({"mu": 0.5}, 7, 3), request(None, None, 4)], "cpu")
    second = columns_of([request({"mu": 1, "plausible_min_p": 0.1}, -1, 5), request({"plausible_min_p": 0.5})], "cpu")
    joined = first.followed_by(second)
    assert not first.any_min_p and joined.any_min_p
    assert joined.mu_S.tolist() == [0.5, 0.0, 1.0, 0.0]
    assert joined.seed_S.tolist() == [7, 0, -1, 0] and joined.prompt_S.tolist() == [3, 4, 5, 3]
    # A guard belongs to a mu.
    torch.testing.assert_close(joined.min_p_S[2:], torch.tensor([math.log(0.1), -math.inf]))
    kept = joined.select(torch.tensor([2, 0]))
    assert isinstance(kept, Columns) and kept.mu_S.tolist() == [1.0, 0.5] and kept.prompt_S.tolist() == [5, 3]


def test_each_row_has_its_own_guard() -> None:
    """Both forms and none in one batch, which then loses rows and gains others; a tie with the k-th token stays."""
    policy = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    guards = ({"plausible_top_k": 2}, {"plausible_min_p": 0.9}, {}, {"plausible_top_k": 1}, {"plausible_top_k": 4})
    first = columns_of([request({"mu": 0.5, **guard}) for guard in guards[:3]], "cpu")
    second = columns_of([request({"mu": 0.0, **guard}) for guard in guards[3:]], "cpu")
    assert (first.most_top_k, second.most_top_k) == (2, 4)
    both = first.select(torch.tensor([2, 0, 1])).followed_by(second)
    both = both.followed_by(columns_of([request({"plausible_top_k": 1}), request()], "cpu"))
    assert both.most_top_k == 4 and both.top_k_S.tolist() == [0, 2, 0, 1, 4, 0, 0]
    calibrated = subtract_memory(policy.repeat(7, 1), torch.zeros(7, 5), both, torch.ones(7, 1))
    kept = [set(row.isfinite().nonzero()[:, 0].tolist()) for row in calibrated]
    assert kept == [{0, 1, 2, 3, 4}, {1, 2, 3}, {1}, {1}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}]
    assert both.untouched_S.tolist() == [False] * 5 + [True] * 2


@each_case(
    "custom",
    [
        None,
        {},
        {"mu": 0},
        {"mu": 1.5},
        {"mu": 0.5, "plausible_min_p": 1},
        {"plausible_min_p": 0.1},
        {"mu": 0.5, "plausible_top_k": 1},
    ],
)
def test_good_custom_parameters(custom: object) -> None:
    check_request(custom, has_memory=True)


@each_case(
    "custom",
    [
        [0.5],
        {"mu": "1"},
        {"mu": True},
        {"mu": None},
        {"mu": -0.1},
        {"mu": math.nan},
        {"mu": math.inf},
        {"plausible_min_p": 0},
        {"plausible_min_p": 1.01},
        {"plausible_top_k": 0},
        {"plausible_top_k": 2.5},
        {"plausible_top_k": 2**31},
        {"plausible": 0.1},
        {"lambda": 1},
    ],
)
def test_bad_custom_parameters(custom: object) -> None:
    with pytest.raises(ValueError, match="custom_params"):
        check_request(custom, has_memory=True)


def test_a_mu_needs_a_memory() -> None:
    check_request(None, has_memory=False)
    with pytest.raises(ValueError, match="holds none"):
        check_request({"mu": 0.0}, has_memory=False)
