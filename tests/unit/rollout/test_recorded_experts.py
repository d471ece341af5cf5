"""Where a mixture of experts sends tokens: the engine's records against transformers' routers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from cases import each_case
from torch import Tensor

from megasharp.algos.recipe import training_sequence
from megasharp.batching.packing import PackLayout, pack
from megasharp.common.records import (
    Completion,
    GenerateRequest,
    Group,
    Outcome,
    Prompt,
    Response,
    Routing,
    SamplingParams,
    TaskAnswer,
    Verdict,
)
from megasharp.convert.architecture import Experts
from megasharp.rollout.inprocess import cache, decode_loop
from megasharp.rollout.inprocess.expert_layer import ExpertWeights, Mixture
from tests.unit.rollout.conftest import MakeModel, engine_of

if TYPE_CHECKING:
    import pytest
    from transformers import PreTrainedModel

PROMPTS = ((3, 7, 1, 9, 4, 4, 2), (5, 6, 7), (8,), (3, 7, 1, 9, 4, 4, 2, 11, 12))
REQUESTS = [GenerateRequest(tokens, tuple(range(10 * i, 10 * i + 5))) for i, tokens in enumerate(PROMPTS)]
SAMPLING = SamplingParams(max_tokens=14, stop_token_ids=(2, 5))
MANY = {"num_experts": 300, "num_experts_per_tok": 5, "moe_intermediate_size": 8}


def routed_by_transformers(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """int64 [tokens, layers, per_token], in ascending order: the choices of a full forward."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(model.config.num_experts_per_tok).indices for layer in logits], dim=1).sort().values


def assert_routed(model: PreTrainedModel, prompt: Sequence[int], completion: Completion) -> None:
    tokens = [*prompt, *completion.tokens.tolist()]
    assert completion.experts is not None
    assert torch.equal(completion.experts.long().sort().values, routed_by_transformers(model, tokens[:-1]))


@each_case(("family", "changes"), [("qwen3_moe", {}), ("mixtral", {"sliding_window": 6}), ("qwen3_moe", MANY)])
def test_recorded_experts_are_transformers_choices(
    make_model: MakeModel, family: str, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every position: prompts that several share, rows of several blocks that end and are refilled."""
    monkeypatch.setattr(cache, "BLOCK", 3)
    monkeypatch.setattr(decode_loop, "SHORT", 0)
    model, folder = make_model(family, **changes)
    engine = engine_of(model, folder, max_batch=7, records_experts=True)
    for prompt, group in zip(PROMPTS, engine.generate(REQUESTS, SAMPLING), strict=True):
        for completion in group:
            assert_routed(model, prompt, completion)
            assert completion.experts is not None
            assert completion.experts.dtype == (torch.int16 if changes is MANY else torch.uint8)


def test_packed_rows_have_the_experts_of_their_text(make_model: MakeModel) -> None:
    """From the engine to the micro-batches; a response has a row for each token of its text but the last."""
    model, folder = make_model("qwen3_moe")
    samples = engine_of(model, folder, records_experts=True).generate(REQUESTS, SAMPLING)
    groups = [
        Group(
            f"g{number}",
            Prompt(f"p{number}", "t", "", prompt, TaskAnswer(), "s", 0, number),
            tuple(Response(completion, "", Verdict(Outcome.CORRECT, 1.0)) for completion in group),
            0,
        )
        for number, (prompt, group) in enumerate(zip(PROMPTS, samples, strict=True))
    ]
    sequences = [training_sequence(group, index, torch.ones(1)) for group in groups for index in range(5)]
    layout = PackLayout(2, 64, 1, 4, 1.0, share_prompts=False, routing=Routing(2, 3, 6))
    for micro in pack(sequences, layout, seed=0).mini_batches[0].per_rank[0]:
        texts = [sequences[flat].tokens[:-1].tolist() for flat in micro.sequence_ids]
        expected = torch.cat([routed_by_transformers(model, text) for text in texts])
        assert micro.experts_PLK is not None
        assert torch.equal(micro.experts_PLK[: len(expected)].long().sort().values, expected)


def test_only_an_engine_that_is_asked_records_and_a_dense_one_has_nothing_to(make_model: MakeModel) -> None:
    mixture, dense = make_model("qwen3_moe"), make_model("qwen3")
    for engine in (engine_of(*mixture), engine_of(*dense, records_experts=True)):
        assert all(completion.experts is None for completion in chain(*engine.generate(REQUESTS, SAMPLING)))


def test_of_a_response_that_goes_on_experts_begin_with_the_prompt(make_model: MakeModel) -> None:
    model, folder = make_model("qwen3_moe")
    engine = engine_of(model, folder, records_experts=True)
    begun = ((4, 4, 9), (), (1,))
    request = GenerateRequest(PROMPTS[0], (1, 2, 3), begun)
    for before, completion in zip(begun, engine.generate([request], SAMPLING)[0], strict=True):
        assert_routed(model, (*PROMPTS[0], *before), completion)


def test_experts_beside_a_memory_network_are_the_policys(make_model: MakeModel) -> None:
    policy, folder = make_model("qwen3_moe")
    memory = make_model("mixtral", seed=1)
    engine = engine_of(policy, folder, memory=memory, records_experts=True)
    samples = engine.generate(REQUESTS, SamplingParams(max_tokens=9, memory_mu=0.5))
    for prompt, group in zip(PROMPTS, samples, strict=True):
        for completion in group:
            assert_routed(policy, prompt, completion)


def test_a_response_does_not_depend_on_its_batch(make_model: MakeModel) -> None:
    engine = engine_of(*make_model("qwen3_moe", num_experts=12, norm_topk_prob=True), records_experts=True)
    together = engine.generate(REQUESTS, SAMPLING)
    for request, group in zip(REQUESTS, together, strict=True):
        for one, other in zip(group, engine.generate([request], SAMPLING)[0], strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert one.experts is not None and other.experts is not None and torch.equal(one.experts, other.experts)
            torch.testing.assert_close(one.policy_logp, other.policy_logp, atol=1e-5, rtol=0)


@each_case("experts", [Experts(12, 3, 40, normalised=True), Experts(5, 2, 24, normalised=False)])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(experts: Experts) -> None:
    """Experts get one row or many of the same: a product of a single row would be another kernel's."""
    torch.manual_seed(0)
    shapes = (experts.count, 32), (experts.count, 2 * experts.ffn, 32), (experts.count, 32, experts.ffn)
    weights = ExpertWeights(*(torch.randn(shape) for shape in shapes))
    mixture, rows = Mixture(experts, torch.float32, torch.device("cpu")), torch.randn(300, 32)
    with torch.inference_mode():
        whole, routed = mixture(rows, weights)
        assert len({int(count) for count in torch.bincount(routed.flatten())}) > 2
        for first, count in ((0, 2), (7, 3), (100, 11), (200, 64), (40, 200)):
            part, chosen = mixture(rows[first : first + count].clone(), weights)
            assert torch.equal(part, whole[first : first + count])
            assert torch.equal(chosen, routed[first : first + count])
