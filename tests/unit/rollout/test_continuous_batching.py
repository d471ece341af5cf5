"""Rows that begin and end at different steps: what is drawn is that of one sample at a time, and no row waits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from itertools import chain, islice

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.rollout.inprocess import cache as module
from megasharp.rollout.inprocess import decode_loop, decoder, draw_log
from megasharp.rollout.inprocess.cache import KeyValueCache, moved_up
from megasharp.rollout.inprocess.decode_loop import row_count
from megasharp.rollout.inprocess.decoder import Decoder
from megasharp.rollout.inprocess.draw_log import DrawLog
from megasharp.rollout.inprocess.generation import Draw
from tests.unit.rollout.conftest import MakeModel, engine_of
from tests.unit.rollout.test_engine_against_transformers import assert_policy_logp

SMALLER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "max_position_embeddings": 400}
LONGER = {"max_position_embeddings": 400}
COLUMNS = (
    *("policy_logp", "sampler_logp", "memory_logp", "calibration_kl", "entropy", "top_logp"),
    *("tokens", "argmax_moved"),
)


def uneven_requests(seed: int, count: int) -> list[GenerateRequest]:
    """Prompts of 1 to 12 tokens, 0 to 6 samples each, limits lognormal around 8; one prompt comes twice."""
    drawn = random.Random(seed)
    seeds = iter(range(10_000))
    requests = []
    for _ in range(count):
        tokens = tuple(drawn.randrange(23) for _ in range(drawn.randint(1, 12)))
        limit = max(1, min(40, round(8 * drawn.lognormvariate(0, 1))))
        requests.append(GenerateRequest(tokens, tuple(next(seeds) for _ in range(drawn.randint(0, 6))), (), limit))
    return [*requests, GenerateRequest(requests[0].tokens, (next(seeds), next(seeds)))]


def pairs(
    requests: list[GenerateRequest], samples: list[list[Completion]]
) -> Iterator[tuple[tuple[int, ...], Completion]]:
    for request, group in zip(requests, samples, strict=True):
        yield from ((request.tokens, completion) for completion in group)


def assert_same(one: Completion, other: Completion) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert (one.finish_reason, one.version_spans, one.seed) == (other.finish_reason, other.version_spans, other.seed)
    for name in COLUMNS:
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right, atol=1e-5, rtol=0)


@dataclass(frozen=True)
class Case:
    """A policy, how it is sampled, with a memory network where `options` say so, and the rows of a cache's block."""

    family: str
    changes: Mapping[str, object] = field(default_factory=dict)
    memory_window: int | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    block: int = 3


@each_case(
    "case",
    [
        Case("qwen3", block=32),
        Case(
            *("qwen2", {"num_key_value_heads": 1}),
            options={"temperature": 1.3, "top_p": 0.8, "top_k": 9, "record_top": 3},
        ),
        Case("ministral", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),
        Case("qwen3", {}, 7, {"memory_mu": 0.6, "temperature": 0.8}),
    ],
)
def test_a_completion_is_that_of_one_sample_at_a_time(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """In every column, with rows of one block and of many, refilled and dropped; the policy's is transformers' too."""
    assert_as_one_at_a_time(make_model, monkeypatch, case)


@pytest.mark.long("ranks")
@each_case(
    "case",
    [
        Case("qwen3"),
        Case("mistral", {"sliding_window": 5}, options={"temperature": 0.0}),
        Case("llama", options={"memory_mu": 0.4}),
        Case("olmo2", options={"memory_mu": 0.4}),
    ],
)
def test_a_completion_of_the_other_families_is_that_too(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    assert_as_one_at_a_time(make_model, monkeypatch, case)


def assert_as_one_at_a_time(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    family, changes, memory_window, options, block = astuple(case)
    monkeypatch.setattr(module, "BLOCK", block)
    policy = make_model(family, seed=0, **LONGER, **changes)
    memory = make_model("qwen3", seed=1, **SMALLER) if "memory_mu" in options else None
    sampling = SamplingParams(40, stop_token_ids=(2,), **options)
    requests = uneven_requests(seed=block, count=6)
    alone = engine_of(*policy, memory=memory, memory_window=memory_window, max_batch=1).generate(requests, sampling)
    for rows in (3, 16):
        engine = engine_of(*policy, memory=memory, memory_window=memory_window, max_batch=rows)
        found = engine.generate(requests, sampling)
        assert [len(group) for group in found] == [len(request.seeds) for request in requests]
        for one, other in zip(chain(*found), chain(*alone), strict=True):
            assert_same(one, other)
    for prompt, completion in pairs(requests, found):
        assert_policy_logp(policy[0], prompt, completion, sampling.temperature or 1.0)
    places = random.Random(block).sample(range(len(requests)), len(requests))
    with engine.stream([(requests[place], sampling) for place in places], at_once=7) as ended:
        for number, group in ended:
            for one, other in zip(group, alone[places[number]], strict=True):
                assert_same(one, other)
            places[number] = -1
    assert set(places) == {-1}


class Watched:
    """Each step's rows and prompts, and the lengths that rows have before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.prompts: list[int] = []
        self.blocks: list[int] = []
        step = Decoder.step

        def watched(of: Decoder, tokens_S: Tensor, cache: KeyValueCache) -> Tensor:
            logits = step(of, tokens_S, cache)
            self.rows.append(tokens_S.numel())
            self.prompts.append(cache.prompts.lengths_B.numel())
            self.blocks.append(cache.own(0, 0, 1)[0].shape[0] // of.architecture.kv_heads)
            return logits

        monkeypatch.setattr(decoder.Decoder, "step", watched)


def steps_of(limits: list[int], rows: int) -> int:
    """The steps that plain list scheduling takes: each sample begins in the step after another has ended."""
    free = [0] * rows
    for limit in limits:
        free[free.index(min(free))] += limit
    return max(free)


def test_a_row_that_ends_begins_the_next_sample_in_the_next_step(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are those of list scheduling, whose last token needs none; whole batches take the sum of maxima."""
    requests = [request for request in uneven_requests(3, 30)[:-1] if request.seeds]
    limits = sorted((request.max_tokens or 40 for request in requests for _ in request.seeds), reverse=True)
    model = make_model(**LONGER)
    watched = Watched(monkeypatch)
    engine_of(*model, max_batch=8).generate(requests, SamplingParams(40))
    assert len(watched.rows) == steps_of(limits, 8) - 1
    assert max(watched.rows) <= 8


def test_an_endless_stream_is_sampled_in_bounded_memory(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of sampling in turn, and a response of 39 tokens among many of up to 7: they end while it goes on.

    What is kept of drawn tokens is bounded by the longest response, and requests are taken only as they begin.
    """
    monkeypatch.setattr(draw_log, "FIRST_STEPS", 2)
    kept: list[int] = []
    of = DrawLog.of

    def noted(log: DrawLog, rows: list[int], starts: list[int]) -> tuple[Draw, list[int]]:
        assert log._block is not None
        kept.append(log._block.tokens_S.shape[0])
        return of(log, rows, starts)

    monkeypatch.setattr(DrawLog, "of", noted)
    kinds = (SamplingParams(40, stop_token_ids=(2,)), SamplingParams(40, temperature=0.0, record_top=2))
    taken: list[tuple[GenerateRequest, SamplingParams]] = []

    def asked() -> Iterator[tuple[GenerateRequest, SamplingParams]]:
        for number in itertools.count():
            limit = 39 if number == 1 else 1 + number % 7
            request = GenerateRequest((number % 23, 5), (2 * number, 2 * number + 1), (), limit)
            taken.append((request, kinds[number % 2]))
            yield taken[-1]

    engine = engine_of(*make_model(), max_batch=8)
    with engine.stream(asked(), 16) as ended:
        found = list(islice(ended, 60))
    places = [place for place, _ in found]
    assert len(taken) <= 60 + 16 // 2 + 1 and places.index(1) > 10 and max(kept) < 2 * 39
    for place, group in found[::5]:
        request, sampling = taken[place]
        for one, other in zip(group, engine.generate([request], sampling)[0], strict=True):
            assert_same(one, other)


def test_samples_of_several_kinds_begin_in_the_order_in_which_they_were_asked_for(make_model: MakeModel) -> None:
    """Responses of one length end in the order in which they began: none overtakes those of another kind."""
    kinds = [SamplingParams(3, temperature=temperature) for temperature in (0.5, 1.0, 1.0, 2.0, 0.5)]
    asked = [(GenerateRequest((number, 3), (number,)), kinds[number % 5]) for number in range(20)]
    with engine_of(*make_model(), max_batch=4).stream(asked, 100) as ended:
        places = [place for place, _ in ended]
    assert [sorted(places[first : first + 4]) for first in range(0, 20, 4)] == [
        list(range(first, first + 4)) for first in range(0, 20, 4)
    ]


def test_the_log_of_draws_is_that_of_lists() -> None:
    """Rows that come, end, move and are dropped, at random, with room for two steps at first."""
    drawn = random.Random(1)
    log, rows, tokens = DrawLog(), list[tuple[int, list[int]]](), itertools.count(1)
    for _ in range(300):
        if not rows or drawn.random() < 0.3:
            rows += [(log.steps, []) for _ in range(drawn.randint(1, 3))]
        if log.full:
            log.make_room(min(start for start, _ in rows))
        new = [next(tokens) for _ in rows]
        log.add(Draw(*(torch.tensor(new, dtype=kind) for kind in (torch.int64, torch.float32, torch.float32))))
        for (_, listed), token in zip(rows, new, strict=True):
            listed.append(token)
        ended = [place for place in range(len(rows)) if drawn.random() < 0.2]
        if not ended:
            continue
        found, lengths = log.of(ended, [rows[place][0] for place in ended])
        assert lengths == [len(rows[place][1]) for place in ended]
        assert found.tokens_S.tolist() == [token for place in ended for token in rows[place][1]]
        assert torch.equal(found.policy_logp_S, found.tokens_S.float())
        for place in ended:
            rows[place] = (log.steps, [])
        if drawn.random() < 0.5:
            order = moved_up(len(rows), ended)
            rows = [rows[place] for place in order]
            log.keep(torch.tensor(order, dtype=torch.int64))
    assert log._block is not None and log._block.tokens_S.shape[0] < 300


def test_prompts_and_blocks_go_with_their_last_sample(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 prompts no more are in the cache than rows read, and one that is read ahead; so it is with blocks."""
    monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(decode_loop, "SHORT", 0)
    requests = [GenerateRequest((n % 23, n // 23), (2 * n, 2 * n + 1), (), 1 + n % 19) for n in range(60)]
    watched = Watched(monkeypatch)
    engine_of(*make_model(), max_batch=8).generate(requests, SamplingParams(40))
    assert max(watched.prompts) <= 8 + 2
    assert max(watched.blocks) <= 8 * 5 and watched.blocks[-1] <= 8


def test_places_are_closed_up_by_the_last_ones() -> None:
    drawn = random.Random(0)
    for count in range(1, 20):
        freed = [place for place in range(count) if drawn.random() < 0.4]
        order = moved_up(count, freed)
        assert sorted(order) == [place for place in range(count) if place not in freed]
        moves = [place for place, source in enumerate(order) if place != source]
        assert all(place in freed for place in moves)


def test_few_row_counts_are_computed() -> None:
    counts = {row_count(live) for live in range(1, 513)}
    assert len(counts) < 50 and all(live <= row_count(live) <= max(live + 3, live * 9 / 8) for live in range(1, 513))
