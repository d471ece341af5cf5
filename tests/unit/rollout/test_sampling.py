"""Drawing from extreme logits, ties, and in blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import each_case
from torch.distributions import Categorical, kl_divergence

from megasharp.common.records import Plausible, SamplingParams
from megasharp.rollout.inprocess import generation as module
from megasharp.rollout.inprocess.generation import Logits, draw


def test_a_token_without_mass_is_never_drawn() -> None:
    logits = torch.full((20_000, 5), float("-inf"))
    logits[:, 1], logits[:, 3] = 0.0, -1.0
    drawn = draw(Logits(logits), torch.arange(20_000), 0, SamplingParams(max_tokens=1))
    assert set(drawn.tokens_S.tolist()) == {1, 3}


def test_large_and_equal_logits_stay_exact() -> None:
    logits = torch.tensor([[-1e4, 3e4, -2e4], [-9e3, -9e3, -9e3]])
    drawn = draw(Logits(logits), torch.tensor([1, 2]), 0, SamplingParams(max_tokens=1))
    assert drawn.tokens_S[0] == 1
    assert drawn.policy_logp_S.tolist() == pytest.approx([0.0, -1.0986123], abs=1e-6)


def test_ties_at_the_cut_keep_exactly_k_tokens() -> None:
    drawn = draw(Logits(torch.zeros(4000, 6)), torch.arange(4000), 0, SamplingParams(max_tokens=1, top_k=2))
    assert set(drawn.tokens_S.tolist()) == {0, 1}
    assert torch.allclose(drawn.sampler_logp_S, torch.tensor(0.5).log())
    assert torch.allclose(drawn.policy_logp_S, torch.tensor(1 / 6).log())


def drawn_in_numpy(probs: np.ndarray, params: SamplingParams, uniform: float) -> tuple[int, float]:
    """A token and its log-prob, cut step by step with renormalisation after each; there are no ties."""
    alive = {int(token): float(probs[token]) for token in np.argsort(-probs)}
    if params.top_k:
        alive = dict(list(alive.items())[: params.top_k])
    total, before, nucleus = sum(alive.values()), 0.0, {}
    for token, share in alive.items():
        if before / total < params.top_p:
            nucleus[token] = share
        before += share
    largest = max(nucleus.values()) / sum(nucleus.values())
    alive = {
        token: share for token, share in nucleus.items() if share / sum(nucleus.values()) >= params.min_p * largest
    }
    tokens, shares = list(alive), np.array(list(alive.values())) / sum(alive.values())
    place = int(np.searchsorted(np.cumsum(shares), uniform, side="right"))
    return tokens[place], float(np.log(shares[place]))


@each_case(
    "params",
    [
        SamplingParams(1, min_p=0.2),
        SamplingParams(1, 0.6, min_p=0.05, top_k=9),
        SamplingParams(1, 1.4, min_p=0.1, top_p=0.7, top_k=8),
        SamplingParams(1, 1.4, min_p=0.05, top_p=0.8, memory_mu=0.5),
        SamplingParams(1, 1.0, top_p=0.7, top_k=50),
    ],
    ids=str,
)
def test_truncation_is_that_of_numpy(params: SamplingParams) -> None:
    """Top-k, top-p and min-p in this order, after the memory's subtraction, by their definitions in float64."""
    generator = torch.Generator().manual_seed(11)
    policy, memory = (2 * torch.randn(300, 60, generator=generator, dtype=torch.float64) for _ in range(2))
    drawn = draw(Logits(policy, memory), torch.arange(300), 2, params)
    logits = (policy - (params.memory_mu or 0.0) * memory).numpy() / params.temperature
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    uniforms = module.uniforms(torch.arange(300), 2).tolist()
    want = [drawn_in_numpy(row, params, uniform) for row, uniform in zip(probs, uniforms, strict=True)]
    assert drawn.tokens_S.tolist() == [token for token, _ in want]
    assert drawn.sampler_logp_S.tolist() == pytest.approx([logp for _, logp in want], abs=1e-6)


@each_case(
    "params",
    [
        SamplingParams(1),
        SamplingParams(1, top_p=0.8),
        SamplingParams(1, 0.0),
        SamplingParams(1, memory_mu=0.5, plausible=Plausible(min_p=0.1)),
        SamplingParams(1, memory_mu=0.5, plausible=Plausible(top_k=4)),
        SamplingParams(1, memory_mu=0.5, top_k=3),
    ],
    ids=str,
)
def test_blocks_do_not_change_the_draw(monkeypatch: pytest.MonkeyPatch, params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = Logits(torch.randn(23, 11, generator=generator), torch.randn(23, 11, generator=generator))
    whole = draw(logits, torch.arange(23), 4, params)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 5 * 11)
    parts = draw(logits, torch.arange(23), 4, params)
    assert torch.equal(whole.tokens_S, parts.tokens_S)
    assert torch.equal(whole.sampler_logp_S, parts.sampler_logp_S)
    assert torch.equal(whole.policy_logp_S, parts.policy_logp_S)
    assert whole.memory is not None and parts.memory is not None
    assert torch.equal(whole.memory.logp_S, parts.memory.logp_S)
    assert torch.equal(whole.memory.argmax_moved_S, parts.memory.argmax_moved_S)
    assert torch.equal(whole.memory.kl_S, parts.memory.kl_S)


@each_case("plausible", [None, Plausible(min_p=0.3), Plausible(top_k=3)])
@each_case("temperature", [1.0, 0.7])
def test_what_the_memory_does_to_the_distribution(plausible: Plausible | None, temperature: float) -> None:
    """Against torch's own distributions in float64; truncation has no part in it."""
    generator = torch.Generator().manual_seed(3)
    policy, memory = (torch.randn(40, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    params = SamplingParams(1, temperature, top_k=2, memory_mu=0.8, plausible=plausible)
    found = draw(Logits(policy, memory), torch.arange(40), 0, params).memory
    assert found is not None
    difference = (policy - 0.8 * memory) / temperature
    if plausible is not None:
        share = (policy / temperature).softmax(-1)
        if plausible.min_p is not None:
            difference[share < plausible.min_p * share.amax(-1, keepdim=True)] = -1e9
        else:
            difference[share < share.sort(-1, descending=True).values[:, 2:3]] = -1e9
    before, after = Categorical(logits=policy / temperature), Categorical(logits=difference)
    want = torch.stack(
        [
            kl_divergence(Categorical(logits=a), Categorical(logits=b))
            for a, b in zip(after.logits, before.logits, strict=True)
        ]
    )
    torch.testing.assert_close(found.kl_S.double(), want, atol=1e-6, rtol=0)
    assert found.argmax_moved_S.equal(after.probs.argmax(-1) != before.probs.argmax(-1))
    assert found.argmax_moved_S.any() and not found.argmax_moved_S.all()


def test_what_ties_with_the_last_plausible_token_is_plausible_too() -> None:
    policy = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]]).repeat(4000, 1)
    memory = torch.zeros(4000, 5)
    drawn = {
        k: draw(
            Logits(policy, memory),
            torch.arange(4000),
            0,
            SamplingParams(1, memory_mu=0.5, plausible=Plausible(top_k=k)),
        )
        for k in (1, 2, 3, 4, 9)
    }
    found = {k: set(each.tokens_S.tolist()) for k, each in drawn.items()}
    assert found == {1: {1}, 2: {1, 2, 3}, 3: {1, 2, 3}, 4: {0, 1, 2, 3}, 9: {0, 1, 2, 3, 4}}


def test_candidates_are_the_policys_own_before_anything_is_cut_off() -> None:
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    logits[:, 2] = float("-inf")
    params = SamplingParams(1, 0.7, top_p=0.5, record_top=3)
    candidates = draw(Logits(logits), torch.arange(9), 0, params).candidates
    probabilities = Categorical(logits=logits.double() / 0.7).probs
    entropy = -torch.where(probabilities > 0, probabilities * probabilities.log(), 0.0).sum(dim=1)
    assert candidates is not None and candidates.top_logp_SN.shape == (9, 3)
    torch.testing.assert_close(candidates.entropy_S.double(), entropy, atol=1e-6, rtol=0)
    ranked = probabilities.sort(dim=1, descending=True).values[:, :3].log()
    torch.testing.assert_close(candidates.top_logp_SN.double(), ranked, atol=1e-6, rtol=0)
    assert draw(Logits(logits), torch.arange(9), 0, SamplingParams(1)).candidates is None
