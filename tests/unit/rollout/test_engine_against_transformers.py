"""The engine's tokens and log-probs against transformers' own forward pass and greedy generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch
from cases import each_case

from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams
from tests.unit.families import CLASSES
from tests.unit.rollout.conftest import MakeModel, engine_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = ((3, 7, 1, 9, 4, 4, 2), (5, 6, 7), (8,), (3, 7, 1, 9, 4, 4, 2, 11, 12))
REQUESTS = [GenerateRequest(tokens, tuple(range(10 * i, 10 * i + 3))) for i, tokens in enumerate(PROMPTS)]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 12}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}


def reference_logp(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """float64 [tokens, vocabulary]: log-probs before each of `tokens`, without a cache or padding."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)


def assert_policy_logp(model: PreTrainedModel, prompt: Sequence[int], completion: Completion, t: float) -> None:
    expected = reference_logp(model, prompt, completion.tokens.tolist(), t)
    expected = expected.gather(1, completion.tokens[:, None]).squeeze(1)
    torch.testing.assert_close(completion.policy_logp.double(), expected, atol=1e-5, rtol=0)


@each_case("tied", [True, False])
@each_case(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"num_key_value_heads": 4, "head_dim": 8}),
        ("qwen2", {}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("llama", {}),
        ("mistral", {"sliding_window": None, "head_dim": 16}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts": 130, "num_experts_per_tok": 8}),
        ("mixtral", {"sliding_window": None}),
        ("mixtral", {"sliding_window": 5}),
        ("olmo2", {}),
        ("olmo2", {"num_key_value_heads": 4}),
    ],
)
def test_log_probs_equal_a_full_forward(
    make_model: MakeModel, family: str, changes: dict[str, object], tied: bool
) -> None:
    model, folder = make_model(family, tie_word_embeddings=tied, **changes)
    samples = engine_of(model, folder).generate(REQUESTS, SamplingParams(max_tokens=9, temperature=0.8))
    for prompt, group in zip(PROMPTS, samples, strict=True):
        assert len({tuple(completion.tokens.tolist()) for completion in group}) == 3
        for completion in group:
            assert_policy_logp(model, prompt, completion, 0.8)
            assert torch.equal(completion.sampler_logp, completion.policy_logp)
            assert completion.policy_logp.dtype == torch.float32


@each_case("rope", [YARN, LLAMA3, {**YARN, "rope_type": "linear"}])
def test_scaled_rotary_embeddings(make_model: MakeModel, rope: dict[str, object]) -> None:
    model, folder = make_model("qwen3", rope_parameters=rope)
    samples = engine_of(model, folder).generate(REQUESTS, SamplingParams(max_tokens=20))
    for prompt, group in zip(PROMPTS, samples, strict=True):
        assert_policy_logp(model, prompt, group[0], 1.0)


@each_case("window", [1, 2, 5, 11, 12])
@each_case(
    ("family", "changes"),
    [
        ("mistral", {}),
        ("ministral", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_a_window_hides_what_is_further_back(
    make_model: MakeModel, family: str, changes: dict[str, object], window: int
) -> None:
    """Prompts of 1 to 9 tokens and responses of 25: shorter than the window, and several times as long."""
    model, folder = make_model(family, sliding_window=window, attn_implementation="eager", **changes)
    samples = engine_of(model, folder).generate(REQUESTS, SamplingParams(max_tokens=25))
    for prompt, group in zip(PROMPTS, samples, strict=True):
        for completion in group:
            assert_policy_logp(model, prompt, completion, 1.0)


def test_windows_of_samples_that_stop_early(make_model: MakeModel) -> None:
    model, folder = make_model("mistral", sliding_window=6)
    sampling = SamplingParams(max_tokens=30, stop_token_ids=(1,))
    samples = engine_of(model, folder).generate(REQUESTS, sampling)
    assert {FinishReason.STOP, FinishReason.LENGTH} == {c.finish_reason for group in samples for c in group}
    for prompt, group in zip(PROMPTS, samples, strict=True):
        for completion in group:
            assert_policy_logp(model, prompt, completion, 1.0)


@each_case("family", CLASSES)
def test_greedy_equals_transformers_generate(make_model: MakeModel, family: str) -> None:
    windows = {"sliding_window": 7} if family in ("mistral", "ministral", "mixtral") else {}
    model, folder = make_model(family, **windows)
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    for prompt, (completion, again, _) in zip(
        PROMPTS, engine_of(model, folder).generate(REQUESTS, greedy), strict=True
    ):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert completion.tokens.tolist() == expected[0, len(prompt) :].tolist() == again.tokens.tolist()
        assert_policy_logp(model, prompt, completion, 1.0)


@each_case(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (5, 0.7)])
def test_truncation_keeps_the_right_tokens_and_renormalises(make_model: MakeModel, top_k: int, top_p: float) -> None:
    model, folder = make_model("qwen3")
    sampling = SamplingParams(max_tokens=8, temperature=1.3, top_k=top_k, top_p=top_p)
    for prompt, group in zip(PROMPTS, engine_of(model, folder).generate(REQUESTS, sampling), strict=True):
        for completion in group:
            tokens = completion.tokens.tolist()
            assert_policy_logp(model, prompt, completion, 1.3)
            for row, token, logp in zip(
                reference_logp(model, prompt, tokens, 1.3).tolist(),
                tokens,
                completion.sampler_logp,
                strict=True,
            ):
                kept = kept_tokens(row, top_k, top_p)
                mass = sum(torch.tensor(row)[kept].exp().tolist())
                assert token in kept
                assert float(logp) == pytest.approx(row[token] - torch.tensor(mass).log().item(), abs=2e-5)


def kept_tokens(logp: list[float], top_k: int, top_p: float) -> list[int]:
    """Plain loops: the top_k likeliest, then of those the fewest whose share reaches top_p."""
    ranked = sorted(range(len(logp)), key=lambda token: -logp[token])[: top_k or None]
    probabilities = torch.tensor(logp, dtype=torch.float64).exp()
    total, kept, reached = float(probabilities[ranked].sum()), [], 0.0
    for token in ranked:
        if reached >= top_p * total:
            break
        kept.append(token)
        reached += float(probabilities[token])
    return kept


def test_first_token_follows_the_softmax(make_model: MakeModel) -> None:
    model, folder = make_model("qwen3")
    count = 20_000
    request = GenerateRequest(PROMPTS[0], tuple(range(count)))
    (samples,) = engine_of(model, folder, max_batch=4096).generate([request], SamplingParams(max_tokens=1))
    counts = torch.bincount(torch.cat([sample.tokens for sample in samples]), minlength=23).double()
    expected = reference_logp(model, PROMPTS[0], [0])[0].exp() * count
    common = expected > 5
    chi_square = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    degrees = int(common.sum()) - 1
    assert chi_square < degrees + 4.5 * (2 * degrees) ** 0.5
    assert all(sample.finish_reason is FinishReason.LENGTH for sample in samples)


def test_second_tokens_of_one_seed_do_not_repeat_the_first(make_model: MakeModel) -> None:
    """A head of zeros is a uniform distribution: tokens of consecutive positions must be independent."""
    model, folder = make_model("qwen3", vocab_size=16)
    torch.nn.init.zeros_(model.lm_head.weight)
    request = GenerateRequest((1,), tuple(range(4096)))
    (samples,) = engine_of(model, folder).generate([request], SamplingParams(max_tokens=2))
    pairs = torch.stack([sample.tokens for sample in samples])
    table = torch.bincount(pairs[:, 0] * 16 + pairs[:, 1], minlength=256).double()
    assert float(((table - 16) ** 2 / 16).sum()) < 255 + 4.5 * (2 * 255) ** 0.5
