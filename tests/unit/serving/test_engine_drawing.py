"""The engine's arithmetic of drawing against the in-process engine's, which works in float64 from log-probs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megasharp.ops.uniform import uniforms
from megasharp.rollout.inprocess.sampling import Logits
from megasharp.rollout.inprocess.sampling import draw as draw_inprocess
from megasharp.serving.engine.drawing import draw, logp_at, subtract_memory, truncate
from megasharp.serving.engine.requests import Columns, check_request, columns_of
from megasharp.types import SamplingParams

ROWS, VOCABULARY = 200, 40


def request(custom: dict[str, float] | None = None, seed: int | None = None, prompt: int = 3) -> Any:
    params = SimpleNamespace(custom_params=custom, sampling_seed=seed)
    return SimpleNamespace(sampling_params=params, origin_input_ids=[0] * prompt)


def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    policy = 3 * torch.randn(ROWS, VOCABULARY, generator=generator)
    return policy, 3 * torch.randn(ROWS, VOCABULARY, generator=generator)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1, temperature=0.7, memory_mu=0.4),
        SamplingParams(1, temperature=1.3, memory_mu=0.9, plausible=0.1),
        SamplingParams(1, memory_mu=0.5, top_p=0.8),
        SamplingParams(1, temperature=0.6, memory_mu=0.2, top_k=7, top_p=0.6, plausible=0.05),
        SamplingParams(1, memory_mu=0.0, plausible=1.0),
    ],
)
def test_same_tokens_and_log_probs_as_in_process(sampling: SamplingParams) -> None:
    policy, memory = logits()
    seeds = torch.arange(ROWS)
    want = draw_inprocess(Logits(policy, memory), seeds, 5, sampling)
    custom = {"mu": sampling.memory_mu} | ({"plausible": sampling.plausible} if sampling.plausible else {})
    columns = columns_of([request(custom)] * ROWS, "cpu")
    temperature = torch.full((ROWS, 1), sampling.temperature)
    calibrated = subtract_memory(policy, memory, columns, temperature)
    probs = (calibrated / temperature).softmax(-1)
    top_k = torch.full((ROWS,), sampling.top_k or VOCABULARY)
    kept, tokens_by_rank = truncate(probs, top_k, torch.full((ROWS,), sampling.top_p), torch.zeros(ROWS))
    if sampling.top_k or sampling.top_p < 1:
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
    second = columns_of([request({"mu": 1, "plausible": 0.1}, -1, 5), request({"plausible": 0.5})], "cpu")
    joined = first.followed_by(second)
    assert not first.guarded and joined.guarded
    assert joined.mu_S.tolist() == [0.5, 0.0, 1.0, 0.0]
    assert joined.seed_S.tolist() == [7, 0, -1, 0] and joined.prompt_S.tolist() == [3, 4, 5, 3]
    # A guard belongs to a mu.
    torch.testing.assert_close(joined.plausible_S[2:], torch.tensor([math.log(0.1), -math.inf]))
    kept = joined.select(torch.tensor([2, 0]))
    assert isinstance(kept, Columns) and kept.mu_S.tolist() == [1.0, 0.5] and kept.prompt_S.tolist() == [5, 3]


@pytest.mark.parametrize("custom", [None, {}, {"mu": 0}, {"mu": 1.5}, {"mu": 0.5, "plausible": 1}, {"plausible": 0.1}])
def test_good_custom_parameters(custom: object) -> None:
    check_request(custom, has_memory=True)


@pytest.mark.parametrize(
    "custom",
    [
        [0.5],
        {"mu": "1"},
        {"mu": True},
        {"mu": None},
        {"mu": -0.1},
        {"mu": math.nan},
        {"mu": math.inf},
        {"plausible": 0},
        {"plausible": 1.01},
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
