"""Policy minus memory: tokens and all three log-probs against transformers' forward passes of both networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.common.records import Completion, GenerateRequest, Plausible, SamplingParams
from megasharp.rollout.inprocess import InProcessEngine, cache
from megasharp.rollout.inprocess.cache import KeyValueCache
from megasharp.rollout.inprocess.decoder import Decoder
from tests.unit.rollout.conftest import MakeModel, engine_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = ((3, 7, 1, 9, 4, 4, 2), (5, 6, 7), (8,), (3, 7, 1, 9, 4, 4, 2, 11, 12))
REQUESTS = [GenerateRequest(tokens, tuple(range(10 * i, 10 * i + 5))) for i, tokens in enumerate(PROMPTS)]
SMALLER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
Networks = tuple["PreTrainedModel", "PreTrainedModel"]


def pair_of(
    make_model: MakeModel, memory_family: str = "qwen3", policy_family: str = "qwen3", **options: int | None
) -> tuple[Networks, InProcessEngine]:
    """A policy, a memory of another size, and the engine that serves both."""
    policy, folder = make_model(policy_family, seed=0)
    memory = make_model(memory_family, seed=1, attn_implementation="eager", **SMALLER)
    return (policy, memory[0]), engine_of(policy, folder, memory=memory, **options)


def logits_before(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], window: int | None = None
) -> Tensor:
    """float64 [tokens, vocabulary], without a cache or padding; `window` is the memory network's."""
    count = len(prompt) + len(tokens)
    mask = None if window is None else windowed_mask(count, len(prompt), window)[None, None]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]]), attention_mask=mask).logits[0]
    return logits[len(prompt) - 1 : -1].double()


def windowed_mask(count: int, prompt: int, window: int) -> Tensor:
    """float32 [count, count], added to scores: a query sees the prompt's keys and the last `window`, as defined."""
    seen = [[key <= query and (key < prompt or key > query - window) for key in range(count)] for query in range(count)]
    return torch.zeros(count, count).masked_fill(~torch.tensor(seen), float("-inf"))


def plain_sampler(policy: Tensor, memory: Tensor, sampling: SamplingParams) -> list[float]:
    """The probability of every token, by plain loops; `policy` and `memory` are logits [vocabulary]."""
    temperature = sampling.temperature
    weights = ((policy - sampling.memory_mu * memory) / temperature).softmax(0).tolist()
    own = (policy / temperature).softmax(0).tolist()
    if sampling.plausible is not None:
        weights = [w if p >= least_of(own, sampling.plausible) else 0.0 for w, p in zip(weights, own, strict=True)]
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])[: sampling.top_k or None]
    total = sum(weights[token] for token in ranked)
    kept, reached = dict.fromkeys(range(len(weights)), 0.0), 0.0
    for token in ranked:
        if reached >= sampling.top_p * total:
            break
        kept[token] = weights[token]
        reached += weights[token]
    return [weight / sum(kept.values()) for weight in kept.values()]


def least_of(own: list[float], guard: Plausible) -> float:
    """The probability that a token must have under the policy alone."""
    return guard.min_p * max(own) if guard.min_p is not None else sorted(own, reverse=True)[guard.top_k - 1]


def each(samples: list[list[Completion]]) -> Iterator[tuple[Sequence[int], Completion]]:
    for prompt, group in zip(PROMPTS, samples, strict=True):
        yield from ((prompt, completion) for completion in group)


def assert_log_probs(
    networks: Networks,
    prompt: Sequence[int],
    completion: Completion,
    sampling: SamplingParams,
    window: int | None = None,
) -> None:
    tokens = completion.tokens
    policy = logits_before(networks[0], prompt, tokens.tolist())
    memory = logits_before(networks[1], prompt, tokens.tolist(), window)
    for logits, found in ((policy, completion.policy_logp), (memory, completion.memory_logp)):
        assert found is not None
        assert found.dtype == torch.float32
        expected = torch.log_softmax(logits / sampling.temperature, -1).gather(1, tokens[:, None]).squeeze(1)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    probabilities = torch.tensor(
        [plain_sampler(ours, theirs, sampling) for ours, theirs in zip(policy, memory, strict=True)],
        dtype=torch.float64,
    )
    expected = probabilities.gather(1, tokens[:, None]).squeeze(1).log()
    torch.testing.assert_close(completion.sampler_logp.double(), expected, atol=1e-5, rtol=0)


@each_case(
    "sampling",
    [
        SamplingParams(9, memory_mu=0.0),
        SamplingParams(9, memory_mu=0.3),
        SamplingParams(9, memory_mu=1.0, temperature=0.7),
        SamplingParams(9, memory_mu=2.5, temperature=1.6),
        SamplingParams(9, memory_mu=0.5, temperature=1.3, top_p=0.7),
        SamplingParams(9, memory_mu=0.5, top_k=4),
        SamplingParams(9, memory_mu=1.0, temperature=1.3, plausible=Plausible(min_p=0.1)),
        SamplingParams(9, memory_mu=1.0, temperature=1.3, plausible=Plausible(min_p=0.05), top_k=6, top_p=0.8),
        SamplingParams(9, memory_mu=1.0, temperature=1.3, plausible=Plausible(top_k=5)),
        SamplingParams(9, memory_mu=0.7, plausible=Plausible(top_k=8), top_k=6, top_p=0.8),
        SamplingParams(9, memory_mu=0.0, plausible=Plausible(min_p=0.5), top_p=0.9),
    ],
    ids=str,
)
def test_log_probs_equal_full_forwards_of_both_networks(make_model: MakeModel, sampling: SamplingParams) -> None:
    networks, engine = pair_of(make_model)
    for prompt, completion in each(engine.generate(REQUESTS, sampling)):
        assert_log_probs(networks, prompt, completion, sampling)


@each_case(("memory", "policy"), [("qwen2", "qwen3"), ("qwen3", "qwen3_moe"), ("mixtral", "qwen3_moe")])
def test_the_memory_may_be_of_another_family(make_model: MakeModel, memory: str, policy: str) -> None:
    networks, engine = pair_of(make_model, memory, policy)
    sampling = SamplingParams(9, memory_mu=0.4, temperature=0.9)
    for prompt, completion in each(engine.generate(REQUESTS, sampling)):
        assert_log_probs(networks, prompt, completion, sampling)


def test_both_caches_follow_rows_that_finish(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several blocks, over prompts of unequal length and groups that a row count splits."""
    monkeypatch.setattr(cache, "BLOCK", 3)
    networks, engine = pair_of(make_model, max_batch=13)
    sampling = SamplingParams(20, memory_mu=0.6, stop_token_ids=(2, 5, 9))
    samples = engine.generate(REQUESTS, sampling)
    lengths = {completion.tokens.numel() for completion in chain(*samples)}
    assert len(lengths) > 4
    for prompt, completion in each(samples):
        assert_log_probs(networks, prompt, completion, sampling)


@each_case("window", [1, 7, 24])
def test_with_a_window_the_memory_sees_the_prompt_and_the_last_tokens(
    make_model: MakeModel, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and responses shorter and longer than the window, rows that end; the cache is no longer than it."""
    slots: list[int] = []
    step = Decoder.step

    def counted(decoder: Decoder, tokens_S: Tensor, of_rows: KeyValueCache) -> Tensor:
        logits = step(decoder, tokens_S, of_rows)
        slots.extend([of_rows.keys[0].shape[2]] * (decoder.architecture.num_layers == SMALLER["num_hidden_layers"]))
        return logits

    monkeypatch.setattr(Decoder, "step", counted)
    networks, engine = pair_of(make_model, max_batch=13, memory_window=window)
    sampling = SamplingParams(25, temperature=0.8, memory_mu=0.6, stop_token_ids=(2, 5))
    for prompt, completion in each(engine.generate(REQUESTS, sampling)):
        assert_log_probs(networks, prompt, completion, sampling, window)
    assert max(slots) == window


def test_a_window_of_the_whole_response_is_none(make_model: MakeModel) -> None:
    """Bit for bit, in every number of every token; a window shorter by one is another network."""
    sampling = SamplingParams(12, memory_mu=0.6)
    plain, whole, shorter = (
        [*chain(*pair_of(make_model, memory_window=window)[1].generate(REQUESTS, sampling))]
        for window in (None, 11, 10)
    )
    for one, other in zip(plain, whole, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        for name in ("sampler_logp", "policy_logp", "memory_logp", "calibration_kl"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    assert any(
        not torch.equal(one.memory_logp[-1:], other.memory_logp[-1:]) for one, other in zip(plain, shorter, strict=True)
    )


@each_case(("mu", "plausible"), [(0.0, None), (0.8, None), (3.0, Plausible(min_p=0.2)), (3.0, Plausible(top_k=4))])
def test_greedy_takes_the_largest_difference(make_model: MakeModel, mu: float, plausible: Plausible | None) -> None:
    networks, engine = pair_of(make_model)
    greedy = SamplingParams(12, temperature=0.0, top_p=0.5, memory_mu=mu, plausible=plausible)
    at_one = SamplingParams(12, memory_mu=mu, plausible=plausible)
    for prompt, completion in each(engine.generate(REQUESTS, greedy)):
        policy, memory = (logits_before(network, prompt, completion.tokens.tolist()) for network in networks)
        difference = policy - mu * memory
        if plausible is not None:
            own = policy.softmax(-1)
            least = torch.tensor([least_of(row, plausible) for row in own.tolist()], dtype=torch.float64)
            difference[own < least[:, None]] = float("-inf")
        assert torch.equal(completion.tokens, difference.argmax(-1))
        assert_log_probs(networks, prompt, completion, at_one)


@each_case(
    "sampling",
    [
        SamplingParams(1, memory_mu=0.7),
        SamplingParams(1, memory_mu=1.5, temperature=1.4),
        SamplingParams(1, memory_mu=1.0, temperature=1.2, top_p=0.8),
        SamplingParams(1, memory_mu=1.0, temperature=1.5, plausible=Plausible(min_p=0.1)),
    ],
    ids=str,
)
def test_first_token_follows_the_closed_form(make_model: MakeModel, sampling: SamplingParams) -> None:
    """Chi-square of 20,000 draws within 4.5 standard deviations; the policy alone is far outside."""
    networks, engine = pair_of(make_model, max_batch=4096)
    count = 20_000
    (samples,) = engine.generate([GenerateRequest(PROMPTS[0], tuple(range(count)))], sampling)
    counts = torch.bincount(torch.cat([sample.tokens for sample in samples]), minlength=23).double()
    policy, memory = (logits_before(network, PROMPTS[0], [0])[0] for network in networks)
    closed = torch.tensor(plain_sampler(policy, memory, sampling), dtype=torch.float64)
    alone = (policy / sampling.temperature).softmax(0)

    def excess(probabilities: Tensor) -> float:
        expected = probabilities * count
        common = expected > 5
        degrees = int(common.sum()) - 1
        chi_square = float(((counts - expected)[common] ** 2 / expected[common]).sum())
        return (chi_square - degrees) / (2 * degrees) ** 0.5

    assert int(counts[closed == 0].sum()) == 0
    assert excess(closed) < 4.5 < 100 < excess(alone)


def test_without_subtraction_tokens_are_the_plain_engines(make_model: MakeModel) -> None:
    """The same tokens, whatever the memory says: subtracting nothing is arithmetic, not a case of its own."""
    policy, folder = make_model("qwen3", seed=0)
    _, engine = pair_of(make_model)
    for options in ({"temperature": 0.8}, {"top_p": 0.7, "top_k": 9}, {"temperature": 0.0}):
        plain = engine_of(policy, folder).generate(REQUESTS, SamplingParams(12, stop_token_ids=(2, 5), **options))
        sampling = SamplingParams(12, stop_token_ids=(2, 5), memory_mu=0.0, **options)
        for alone, beside in zip(chain(*plain), chain(*engine.generate(REQUESTS, sampling)), strict=True):
            assert torch.equal(alone.tokens, beside.tokens)
            assert torch.equal(alone.policy_logp, beside.policy_logp)
            torch.testing.assert_close(alone.sampler_logp, beside.sampler_logp, rtol=1e-6, atol=1e-6)
            assert alone.memory_logp is None
            assert beside.memory_logp is not None
            assert beside.memory_logp.shape == beside.tokens.shape


def test_more_subtraction_draws_what_the_memory_likes_less(make_model: MakeModel) -> None:
    """The mean memory log-prob of drawn first tokens falls with mu, as its closed form does."""
    networks, engine = pair_of(make_model)
    request = GenerateRequest(PROMPTS[1], tuple(range(2000)))
    policy, memory = (logits_before(network, PROMPTS[1], [0])[0] for network in networks)
    means, expected = [], []
    for mu in (0.0, 0.5, 1.0, 2.0):
        sampling = SamplingParams(1, memory_mu=mu)
        (samples,) = engine.generate([request], sampling)
        means.append(float(torch.cat([sample.memory_logp for sample in samples]).mean()))
        probabilities = torch.tensor(plain_sampler(policy, memory, sampling), dtype=torch.float64)
        expected.append(float((probabilities * memory.log_softmax(0)).sum()))
    assert means == pytest.approx(expected, abs=0.15)
    assert all(later < earlier - 0.1 for earlier, later in pairwise(means))
