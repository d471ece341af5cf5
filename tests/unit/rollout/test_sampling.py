"""The hashed uniform numbers against plain-integer splitmix64, and drawing from extreme logits."""

from __future__ import annotations

import pytest
import torch

from megasharp.rollout.inprocess import sampling as module
from megasharp.rollout.inprocess.sampling import Logits, draw, seeds_to_int64, uniforms
from megasharp.types import SamplingParams

CPU = torch.device("cpu")
WORD = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """The reference in unbounded integers; its first output for seed 0 is the published 0xE220A8397B1DCDAF."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


@pytest.mark.parametrize("position", [0, 1, 17, 100_000])
def test_uniforms_equal_splitmix64_in_plain_integers(position: int) -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    seeds = [0, 1, -1, 2**63 - 1, 2**63, 2**64 + 5, 123456789]
    step = (position + 1) * 0x9E3779B97F4A7C15
    expected = [(splitmix64((splitmix64(seed & WORD) + step) & WORD) >> 12) / 2**52 for seed in seeds]
    assert uniforms(seeds_to_int64(seeds, CPU), position).tolist() == expected


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


@pytest.mark.parametrize("params", [SamplingParams(1), SamplingParams(1, top_p=0.8), SamplingParams(1, 0.0)])
def test_blocks_do_not_change_the_draw(monkeypatch: pytest.MonkeyPatch, params: SamplingParams) -> None:
    logits = torch.randn(23, 11, generator=torch.Generator().manual_seed(0))
    whole = draw(Logits(logits), torch.arange(23), 4, params)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 5 * 11)
    parts = draw(Logits(logits), torch.arange(23), 4, params)
    assert torch.equal(whole.tokens_S, parts.tokens_S)
    assert torch.equal(whole.sampler_logp_S, parts.sampler_logp_S)
    assert torch.equal(whole.policy_logp_S, parts.policy_logp_S)
