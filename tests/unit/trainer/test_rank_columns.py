"""Completions laid behind each other on their way from a rank, and taken apart again."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import chain

import torch

from megasharp.common.records import GenerateRequest, SamplingParams
from megasharp.trainer.rank_engines import from_columns, to_whole
from tests.unit.rollout.conftest import MakeModel, engine_of, make_model  # noqa: F401

REQUESTS = [GenerateRequest((3, 7, 1), (1, 2)), GenerateRequest((8,), (3,)), GenerateRequest((3, 7), (4,), ((5, 6),))]


def test_completions_come_back_with_the_experts_of_all_that_was_read(make_model: MakeModel) -> None:  # noqa: F811
    engine = engine_of(*make_model("qwen3_moe"), records_experts=True)
    sampled = engine.generate(REQUESTS, SamplingParams(max_tokens=9, stop_token_ids=(2, 5), record_top=2))
    bare = [[replace(completion, experts=None) for completion in group] for group in sampled]
    for group in (sampled, bare):
        (whole,) = to_whole(list(enumerate(group)))
        seeds = [seed for request in REQUESTS for seed in request.seeds]
        for found, expected in zip(from_columns(whole.columns, seeds, 0), chain(*group), strict=True):
            for field in fields(expected):
                one, other = getattr(found, field.name), getattr(expected, field.name)
                assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other, field.name
