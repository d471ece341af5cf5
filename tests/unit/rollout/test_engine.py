"""The engine's promises that need no reference model: seeds, stops, weight loads, and refusals."""

from __future__ import annotations

import json
from itertools import chain

import pytest
import torch
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams, VersionSpan
from megasharp.rollout.inprocess import InProcessEngine
from tests.unit.rollout.conftest import MakeModel, engine_of

PROMPTS = ((3, 7, 1, 9, 4, 4, 2), (5, 6, 7), (8,))
REQUESTS = [GenerateRequest(tokens, tuple(range(7 * i, 7 * i + 7))) for i, tokens in enumerate(PROMPTS)]
SAMPLING = SamplingParams(max_tokens=10, stop_token_ids=(2, 5))


def rows(samples: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.tokens.tolist() for completion in group] for group in samples]


@each_case("max_batch", [1, 4, 8, 512])
def test_results_do_not_depend_on_the_chunking(make_model: MakeModel, max_batch: int) -> None:
    model, folder = make_model()
    whole = engine_of(model, folder).generate(REQUESTS, SAMPLING)
    chunked = engine_of(model, folder, max_batch=max_batch).generate(REQUESTS, SAMPLING)
    assert rows(chunked) == rows(whole)
    for left, right in zip(chain(*whole), chain(*chunked), strict=True):
        torch.testing.assert_close(left.policy_logp, right.policy_logp, atol=1e-5, rtol=0)


def test_a_seed_fixes_its_completion_whatever_else_is_in_the_batch(make_model: MakeModel) -> None:
    engine = engine_of(*make_model())
    together = rows(engine.generate(REQUESTS, SAMPLING))
    alone = [rows(engine.generate([request], SAMPLING))[0] for request in REQUESTS]
    reversed_seeds = [GenerateRequest(r.tokens, r.seeds[::-1]) for r in reversed(REQUESTS)]
    assert alone == together
    assert [group[::-1] for group in reversed(rows(engine.generate(reversed_seeds, SAMPLING)))] == together


def test_seeds_of_any_size_are_told_apart(make_model: MakeModel) -> None:
    seeds = (0, 1, -1, 2**63, 2**64 - 2, 5 * 10**30)
    (samples,) = rows(engine_of(*make_model()).generate([GenerateRequest((3,), seeds)], SamplingParams(max_tokens=12)))
    assert len({tuple(tokens) for tokens in samples}) == len(seeds)


def test_stops_at_the_end_token_and_keeps_it(make_model: MakeModel) -> None:
    engine = engine_of(*make_model())
    free = engine.generate(REQUESTS, SamplingParams(max_tokens=10))
    stopped = engine.generate(REQUESTS, SAMPLING)
    reasons = set()
    for whole, cut in zip(chain(*rows(free)), chain(*stopped), strict=True):
        ends = [i for i, token in enumerate(whole) if token in SAMPLING.stop_token_ids]
        length = ends[0] + 1 if ends else 10
        assert cut.tokens.tolist() == whole[:length]
        assert cut.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
        assert cut.policy_logp.shape == cut.sampler_logp.shape == (length,)
        assert cut.version_spans == (VersionSpan(0, 0, length),)
        reasons.add(cut.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_long_generation_outgrows_the_cache_many_times(make_model: MakeModel) -> None:
    model, folder = make_model(max_position_embeddings=400)
    (samples,) = engine_of(model, folder).generate([GenerateRequest((3, 4), (1,))], SamplingParams(max_tokens=300))
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, *samples[0].tokens.tolist()]])).logits[0, 1:-1]
    expected = torch.log_softmax(logits.double(), -1).gather(1, samples[0].tokens[:, None]).squeeze(1)
    torch.testing.assert_close(samples[0].policy_logp.double(), expected, atol=1e-4, rtol=0)


def test_results_can_enter_a_backward_pass(make_model: MakeModel) -> None:
    ((completion, *_), *_) = engine_of(*make_model()).generate(REQUESTS, SAMPLING)
    weight = torch.ones_like(completion.policy_logp, requires_grad=True)
    (weight * completion.policy_logp).sum().backward()
    assert torch.equal(weight.grad, completion.policy_logp)


def test_repeated_prompts_and_empty_groups_keep_their_places(make_model: MakeModel) -> None:
    engine = engine_of(*make_model())
    requests = [REQUESTS[0], GenerateRequest(PROMPTS[1], ()), REQUESTS[0]]
    first, nothing, again = rows(engine.generate(requests, SAMPLING))
    assert nothing == []
    assert first == again
    assert engine.generate([], SAMPLING) == []


def test_load_weights_changes_what_is_sampled(make_model: MakeModel) -> None:
    old, folder = make_model(seed=0)
    new, new_folder = make_model(seed=1)
    engine = engine_of(old, folder)
    before = rows(engine.generate(REQUESTS, SAMPLING))
    engine.load_weights(7, new.named_parameters())
    after = engine.generate(REQUESTS, SAMPLING)
    assert engine.version == 7
    assert after[0][0].version_spans[0].version == 7
    assert rows(after) == rows(engine_of(new, new_folder).generate(REQUESTS, SAMPLING)) != before


def test_serves_nothing_before_the_first_weights(make_model: MakeModel) -> None:
    _, folder = make_model()
    engine = InProcessEngine(folder, dtype=torch.float32, device=torch.device("cpu"))
    assert engine.version == -1
    assert not engine.healthy()
    with pytest.raises(RuntimeError, match="load_weights"):
        engine.generate(REQUESTS, SAMPLING)


NORM = "model.norm.weight"


@each_case(
    ("damage", "message"),
    [
        (lambda named: [pair for pair in named if pair[0] != NORM], f"1 missing, among them {NORM}"),
        (
            lambda named: [*named, ("model.extra.weight", torch.zeros(1))],
            "model.extra.weight is not a weight",
        ),
        (lambda named: [*named, named[0]], "model.embed_tokens.weight came twice"),
        (
            lambda named: [(n, t.T if n.endswith("q_proj.weight") else t) for n, t in named],
            r"q_proj.weight has shape \(48, 64\), not \(64, 48\)",
        ),
    ],
)
def test_an_incomplete_load_is_refused_until_a_whole_one(make_model: MakeModel, damage: object, message: str) -> None:
    model, folder = make_model()
    engine = engine_of(model, folder)
    named = list(model.named_parameters())
    before = rows(engine.generate(REQUESTS, SAMPLING))
    with pytest.raises(UserError, match=message):
        engine.load_weights(1, damage(named))
    assert engine.version == 0
    assert not engine.healthy()
    with pytest.raises(RuntimeError):
        engine.generate(REQUESTS, SAMPLING)
    engine.load_weights(1, named)
    assert engine.healthy()
    assert rows(engine.generate(REQUESTS, SAMPLING)) == before


def test_a_stream_that_breaks_leaves_the_engine_unhealthy(make_model: MakeModel) -> None:
    model, folder = make_model()
    engine = engine_of(model, folder)

    def breaking():
        yield next(model.named_parameters())
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError):
        engine.load_weights(1, breaking())
    assert not engine.healthy()


def test_close_frees_and_refuses(make_model: MakeModel) -> None:
    model, folder = make_model()
    engine = engine_of(model, folder)
    engine.close()
    assert not engine.healthy()
    with pytest.raises(RuntimeError):
        engine.generate(REQUESTS, SAMPLING)
    with pytest.raises(RuntimeError):
        engine.load_weights(1, model.named_parameters())


@each_case(
    ("tokens", "sampling", "message"),
    [
        ((), SAMPLING, "a prompt is empty"),
        ((1,) * 39, SAMPLING, "39 tokens and max_tokens 10 exceed .* 48"),
        ((1,) * 60, SAMPLING, "max_position_embeddings 48"),
        ((1, 23), SAMPLING, "vocabulary has 23"),
        ((1, -1), SAMPLING, "vocabulary has 23"),
        ((1,), SamplingParams(max_tokens=0), "max_tokens"),
        ((1,), SamplingParams(max_tokens=1, temperature=-1.0), "temperature"),
        ((1,), SamplingParams(max_tokens=1, temperature=float("nan")), "temperature"),
        ((1,), SamplingParams(max_tokens=1, top_p=0.0), "top_p"),
        ((1,), SamplingParams(max_tokens=1, top_k=-1), "top_k"),
    ],
)
def test_bad_requests_are_one_clear_line(
    make_model: MakeModel, tokens: tuple[int, ...], sampling: SamplingParams, message: str
) -> None:
    engine = engine_of(*make_model())
    with pytest.raises(UserError, match=message) as raised:
        engine.generate([REQUESTS[0], GenerateRequest(tokens, (1,))], sampling)
    assert "\n" not in str(raised.value)
    assert engine.healthy()


def test_a_prompt_may_fill_the_positions_exactly(make_model: MakeModel) -> None:
    engine = engine_of(*make_model())
    ((sample,),) = engine.generate([GenerateRequest((1,) * 38, (1,))], SamplingParams(max_tokens=10))
    assert sample.tokens.numel() == 10


def test_weights_that_are_not_finite_are_reported(make_model: MakeModel) -> None:
    model, folder = make_model()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    engine = engine_of(model, folder)
    with pytest.raises(UserError, match="not finite"):
        engine.generate(REQUESTS, SAMPLING)


@each_case(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_type=proportional"),
        ({"hidden_size": "wide"}, "config.json"),
    ],
)
def test_unsupported_folders_are_one_clear_line(make_model: MakeModel, change: dict[str, object], message: str) -> None:
    _, folder = make_model()
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message) as raised:
        InProcessEngine(folder, dtype=torch.float32, device=torch.device("cpu"))
    assert "\n" not in str(raised.value)


def test_bfloat16_stays_near_float32(make_model: MakeModel) -> None:
    model, folder = make_model(initializer_range=0.05)
    engine = InProcessEngine(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    engine.load_weights(0, model.named_parameters())
    for prompt, group in zip(PROMPTS, engine.generate(REQUESTS, SAMPLING), strict=True):
        tokens = group[0].tokens
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, tokens[:, None]).squeeze(1)
        torch.testing.assert_close(group[0].policy_logp, expected, atol=0.05, rtol=0)


def test_exact_entropy_and_the_sampled_estimate_agree_in_expectation(make_model: MakeModel) -> None:
    """Summed over a response of fixed length both have one expectation; 1,000 responses, four standard errors."""
    engine = engine_of(*make_model())
    request = GenerateRequest((5, 6, 7), tuple(range(1000)))
    (samples,) = engine.generate([request], SamplingParams(max_tokens=6, temperature=0.8, record_top=2))
    exact, drawn = [], []
    for completion in samples:
        assert completion.entropy is not None and completion.top_logp is not None
        assert completion.top_logp.shape == (6, 2)
        assert bool((completion.top_logp[:, 0] >= completion.top_logp[:, 1]).all())
        assert bool((completion.policy_logp <= completion.top_logp[:, 0] + 1e-6).all())
        exact.append(float(completion.entropy.double().sum()))
        drawn.append(-float(completion.policy_logp.double().sum()))
    difference = torch.tensor(exact, dtype=torch.float64) - torch.tensor(drawn, dtype=torch.float64)
    assert abs(float(difference.mean())) < 4 * float(difference.std()) / 1000**0.5
    assert engine.generate([request], SamplingParams(max_tokens=1))[0][0].entropy is None
