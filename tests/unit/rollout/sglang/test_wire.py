"""Requests and answers as JSON, on answers as SGLang 0.5.21 gives them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.common.records import FinishReason, GenerateRequest, Plausible, Routing, SamplingParams, VersionSpan
from megasharp.rollout.sglang.client.api import MalformedAnswer, WeightLabel, completions, generate_body
from megasharp.rollout.sglang.routed_experts import routed_experts

PLAIN = SamplingParams(max_tokens=8, temperature=0.7, stop_token_ids=(1,))
WITH_MEMORY = SamplingParams(max_tokens=8, memory_mu=0.5)


def item(**meta: object) -> dict[str, Any]:
    standard = {
        "finish_reason": {"type": "stop", "matched": 1},
        "output_token_logprobs": [[-0.5, 4, None], [-0.25, 1, None]],
        "weight_version": "12",
        "weight_versions": [{"version": "12", "start": 0, "end": 2}],
    }
    return {"output_ids": [4, 1], "meta_info": {**standard, **meta}}


def test_the_request() -> None:
    body = generate_body(GenerateRequest((6, 20), (991, 992)), PLAIN, ("a", "b"))
    shared = {
        "max_new_tokens": 8,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [1],
        "skip_special_tokens": False,
    }
    assert body == {
        "rid": ["a", "b"],
        "input_ids": [[6, 20], [6, 20]],
        "sampling_params": [{**shared, "sampling_seed": 991}, {**shared, "sampling_seed": 992}],
        "return_logprob": True,
        "stream": False,
    }


def test_custom_parameters_are_numbers_and_only_where_asked() -> None:
    def custom(sampling: SamplingParams) -> object:
        return generate_body(GenerateRequest((6,), (1,)), sampling, ("a",))["sampling_params"][0].get("custom_params")

    assert custom(PLAIN) is None
    assert custom(SamplingParams(8, memory_mu=0.0)) == {"mu": 0.0}
    share, likeliest = Plausible(min_p=0.1), Plausible(top_k=20)
    assert custom(SamplingParams(8, memory_mu=1, plausible=share)) == {"mu": 1.0, "plausible_min_p": 0.1}
    assert custom(SamplingParams(8, memory_mu=1, plausible=likeliest)) == {"mu": 1.0, "plausible_top_k": 20}
    assert custom(SamplingParams(8, plausible=share)) is None


def test_the_answer() -> None:
    [found] = completions([item()], (991,), PLAIN)
    assert found.tokens.tolist() == [4, 1]
    assert found.tokens.dtype == torch.int64
    assert found.sampler_logp.tolist() == found.policy_logp.tolist() == [-0.5, -0.25]
    assert found.memory_logp is None
    assert found.version_spans == (VersionSpan(12, 0, 2),)
    assert (found.finish_reason, found.seed) == (FinishReason.STOP, 991)


def test_the_answer_of_an_engine_with_a_memory() -> None:
    meta = {"sampler_logprob": [-1.0, -2.0], "policy_logprob": [-3.0, -4.0], "memory_logprob": [-5.0, -6.0]}
    meta |= {"argmax_moved": [0.0, 1.0], "calibration_kl": [0.125, 0.5]}
    [found] = completions([item(**meta)], (1,), WITH_MEMORY)
    assert found.argmax_moved is not None and found.calibration_kl is not None
    assert found.argmax_moved.tolist() == [False, True]
    assert found.calibration_kl.tolist() == [0.125, 0.5]
    assert found.memory_logp is not None
    assert [x.tolist() for x in (found.sampler_logp, found.policy_logp, found.memory_logp)] == [
        [-1.0, -2.0],
        [-3.0, -4.0],
        [-5.0, -6.0],
    ]
    [unasked] = completions([item(**meta)], (1,), PLAIN)
    assert unasked.memory_logp is unasked.argmax_moved is unasked.calibration_kl is None
    assert unasked.policy_logp.tolist() == [-3.0, -4.0]


@each_case("sampling", [WITH_MEMORY, SamplingParams(8, top_p=0.9), SamplingParams(8, top_k=5)])
def test_the_policys_log_prob_never_stands_in_for_the_samplers(sampling: SamplingParams) -> None:
    with pytest.raises(MalformedAnswer, match="sampler_logprob"):
        completions([item()], (1,), sampling)


def test_candidates_are_told_where_they_were_asked_for() -> None:
    sampling = SamplingParams(max_tokens=4, record_top=2)
    assert generate_body(GenerateRequest((1,), (5,)), sampling, ["a"])["sampling_params"][0]["custom_params"] == {
        "candidates": 2
    }
    meta = {"policy_entropy": [0.5, 0.25], "candidate_logprob_1": [-0.1, -0.2], "candidate_logprob_2": [-3.0, -4.0]}
    [found] = completions([item(**meta)], (1,), sampling)
    assert found.entropy is not None and found.entropy.tolist() == [0.5, 0.25]
    assert found.top_logp is not None and found.top_logp.allclose(torch.tensor([[-0.1, -3.0], [-0.2, -4.0]]))
    [unasked] = completions([item(**meta)], (1,), PLAIN)
    assert unasked.entropy is None and unasked.top_logp is None
    with pytest.raises(MalformedAnswer, match="policy_entropy"):
        completions([item()], (1,), sampling)


def test_experts_are_returned_where_they_were_asked_for() -> None:
    """Of a prompt of three tokens and a response of two, of which the last was not fed."""
    request, few, many = GenerateRequest((6, 7, 8), (1,)), Routing(2, 2, 256), Routing(2, 2, 257)
    assert generate_body(request, PLAIN, ("a",), with_experts=True)["return_routed_experts"] is True
    assert "return_routed_experts" not in generate_body(request, PLAIN, ("a",))
    numbers = torch.arange(16).view(4, 2, 2) + 100
    for experts, dtype in ((few, torch.uint8), (many, torch.int16)):
        text = base64.b64encode(numbers.to(dtype).numpy().tobytes()).decode()
        [found] = completions([item(prompt_tokens=3, routed_experts=text)], (1,), PLAIN, experts=experts)
        assert found.experts is not None and found.experts.dtype == dtype
        assert found.experts.tolist() == numbers.tolist()
    [unasked] = completions([item(prompt_tokens=3, routed_experts=text)], (1,), PLAIN)
    assert unasked.experts is None
    with pytest.raises(MalformedAnswer, match=r"32 bytes of routed experts; 16 are of 4 positions"):
        completions([item(prompt_tokens=3, routed_experts=text)], (1,), PLAIN, experts=few)
    with pytest.raises(MalformedAnswer, match="routed_experts"):
        completions([item(prompt_tokens=3)], (1,), PLAIN, experts=few)


def test_a_response_that_was_aborted_before_it_was_computed_again_has_no_experts() -> None:
    aborted = item(prompt_tokens=3, finish_reason={"type": "abort", "message": "x"})
    [found] = completions([aborted], (1,), PLAIN, experts=Routing(2, 2, 8))
    assert found.tokens.numel() == 0 and found.finish_reason is FinishReason.ABORT


@each_case(
    ("config", "experts"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, Routing(48, 8, 128)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, Routing(48, 2, 8)),
        ({}, None),
    ],
)
def test_the_experts_of_a_model(tmp_path: Path, config: dict[str, int], experts: Routing | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 48, **config}))
    assert routed_experts(tmp_path) == experts


def test_spans_of_several_versions() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 5}]
    [found] = completions([item(weight_versions=spans)], (1,), PLAIN)
    assert found.version_spans == (VersionSpan(-1, 0, 1), VersionSpan(3, 1, 2))
    [cut] = completions([item(weight_versions=[*spans, {"version": "4", "start": 2, "end": 2}])], (1,), PLAIN)
    assert cut.version_spans == found.version_spans
    [single] = completions([item(weight_versions=None)], (1,), PLAIN)
    assert single.version_spans == (VersionSpan(12, 0, 2),)


def test_a_token_of_another_runs_weights_makes_the_answer_worthless() -> None:
    spans = [{"version": "3@ours", "start": 0, "end": 1}, {"version": "3@theirs", "start": 1, "end": 2}]
    [found] = completions([item(weight_versions=spans[:1])], (1,), PLAIN, "ours")
    assert found.version_spans == (VersionSpan(3, 0, 1),)
    for owner in ("ours", "theirs", ""):
        with pytest.raises(MalformedAnswer, match="weights that another run pushed"):
            completions([item(weight_versions=spans)], (1,), PLAIN, owner)


def test_an_answer_without_tokens() -> None:
    nothing = item(output_token_logprobs=[], finish_reason={"type": "abort", "message": "x"}, weight_versions=[])
    [found] = completions([{**nothing, "output_ids": []}], (5,), PLAIN)
    assert (found.tokens.numel(), found.version_spans) == (0, ())
    assert found.finish_reason is FinishReason.ABORT


@each_case(("bad", "whose"), [(None, "the policy's"), (float("nan"), "the policy's")])
def test_not_finite(bad: float | None, whose: str) -> None:
    with pytest.raises(UserError, match=rf"{whose} logits are not finite \(weights version 12\)"):
        completions([item(output_token_logprobs=[[-0.5, 4, None], [bad, 1, None]])], (1,), PLAIN)


@each_case(
    "answer",
    [
        None,
        {},
        [],
        [item(), item()],
        [{}],
        [item(finish_reason=None)],
        [item(finish_reason={"type": "surprise"})],
        [item(output_token_logprobs=[[-0.5, 4, None]])],
        [item(weight_versions=[{"version": "mine", "start": 0, "end": 2}])],
        [{**item(), "output_ids": ["x", "y"]}],
    ],
)
def test_malformed_answers(answer: object) -> None:
    with pytest.raises(MalformedAnswer):
        completions(answer, (1,), PLAIN)


def test_labels_of_weights() -> None:
    read = [WeightLabel.parse(name) for name in ("default", "0", 3, "17@a1")]
    assert read == [WeightLabel(-1), WeightLabel(0), WeightLabel(3), WeightLabel(17, "a1")]
    assert [str(label) for label in read[1:]] == ["0", "3", "17@a1"]
    assert [label.belongs_to("a1") for label in read] == [True, False, False, True]
    assert [label.belongs_to("") for label in read] == [True, True, True, False]


def test_a_continued_response_is_the_end_of_its_prompt_to_the_engine() -> None:
    request = GenerateRequest((6, 20), (991, 992), ((4, 13, 5), ()))
    body = generate_body(request, PLAIN, ("a", "b"))
    assert body["input_ids"] == [[6, 20, 4, 13, 5], [6, 20]]
    first, second = body["sampling_params"]
    assert (first["max_new_tokens"], first["custom_params"]) == (5, {"begun": 3})
    assert (second["max_new_tokens"], "custom_params" in second) == (8, False)
    beside = generate_body(request, WITH_MEMORY, ("a", "b"))["sampling_params"]
    assert [each["custom_params"] for each in beside] == [{"begun": 3, "mu": 0.5}, {"mu": 0.5}]


@each_case("sampling", [WITH_MEMORY, SamplingParams(max_tokens=8, top_p=0.5)])
def test_what_was_aborted_in_the_queue_comes_without_our_figures_and_counts_as_not_sampled(
    sampling: SamplingParams,
) -> None:
    queued = item(finish_reason={"type": "abort", "message": "Abort in waiting queue"})
    (completion,) = completions([queued], (7,), sampling)
    assert (completion.finish_reason, completion.seed) == (FinishReason.ABORT, 7)
    assert completion.tokens.numel() == completion.sampler_logp.numel() == 0
    assert (completion.memory_logp is not None) is (sampling is WITH_MEMORY)


def test_what_was_aborted_while_it_ran_keeps_its_tokens() -> None:
    (completion,) = completions([item(finish_reason={"type": "abort"})], (7,), PLAIN)
    assert (completion.finish_reason, completion.tokens.tolist()) == (FinishReason.ABORT, [4, 1])
