"""Responses of several turns from an engine that takes requests one by one: the same tokens, ends and continuations."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
import torch
from waiting import HANG_S

from megasharp.common.errors import EnginesLost, NotSampled, UserError
from megasharp.common.records import Completion, FinishReason, GenerateRequest, Prompt, SamplingParams
from megasharp.config.rollout import EpisodesConfig
from megasharp.rollout.episodes.episode_engine import AsyncEpisodes, RoundEpisodes
from megasharp.rollout.in_flight import PromptWork, SampledWith, Unfinished
from megasharp.rollout.inprocess import InProcessEngine
from megasharp.rollout.tally import Tally
from tests.unit.rollout.conftest import MakeModel, engine_of
from tests.unit.rollout.episodes.games import RELEASED, Game, Letters, Sleeps
from tests.unit.rollout.episodes.test_episodes import PROMPT, REQUEST, SAMPLING, turns_of

LETTERS = Letters()
PROBLEM = Prompt("p", "game", "ab", PROMPT, Game("echo"), "games", 0, 0)


class OneByOne:
    """A STAND-IN for a fleet: the in-process engine, one request at a time; an abort cuts what it sampled in half."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.version, self.capacity, self.retried = 0, 8, 0
        self.asked: list[GenerateRequest] = []
        self.lose = 0
        self.held = threading.Event()
        self.held.set()
        self._engine = engine
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(8)
        self._ended: set[Future[list[Completion]]] = set()

    def healthy(self) -> bool:
        return True

    def close(self) -> None:
        self._pool.shutdown()

    def tend(self) -> None:
        pass

    def take_retried(self) -> list[int]:
        return []

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Future[list[Completion]]:
        self.asked.append(request)
        future: Future[list[Completion]] = Future()
        self._pool.submit(self._answer, future, request, sampling)
        return future

    def abort(self, futures: Sequence[Future[list[Completion]]]) -> None:
        self._ended |= set(futures)
        self.held.set()
        wait(futures)

    drop = abort

    def _answer(self, future: Future[list[Completion]], request: GenerateRequest, sampling: SamplingParams) -> None:
        self.held.wait()
        with self._lock:
            if self.lose:
                self.lose -= 1
                future.set_exception(EnginesLost("the engine was lost"))
                return
            (completions,) = self._engine.generate([request], sampling)
        future.set_result([_half(one) for one in completions] if future in self._ended else completions)


def _half(whole: Completion) -> Completion:
    count = whole.tokens.numel() // 2
    names = ("tokens", "sampler_logp", "policy_logp", "entropy", "top_logp")
    cut = {name: getattr(whole, name)[:count] for name in names}
    spans = tuple(replace(span, end=count) for span in whole.version_spans) if count else ()
    return replace(whole, finish_reason=FinishReason.ABORT, version_spans=spans, **cut)


@pytest.fixture
def served(make_model: MakeModel) -> InProcessEngine:
    return engine_of(*make_model(max_position_embeddings=64))


@pytest.fixture
def fleet(served: InProcessEngine) -> OneByOne:
    return OneByOne(served)


@pytest.fixture
def engine(fleet: OneByOne) -> Iterator[AsyncEpisodes]:
    episodes = AsyncEpisodes(fleet, LETTERS, EpisodesConfig())
    yield episodes
    episodes.close()


@pytest.fixture
def expected(served: InProcessEngine) -> Iterator[list[Completion]]:
    rounds = RoundEpisodes(served, LETTERS, EpisodesConfig())
    (completions,) = rounds.generate([REQUEST], SAMPLING)
    yield completions
    rounds.close()


def check_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens.tolist(), one.episode, one.seed) == (other.tokens.tolist(), other.episode, other.seed)
        assert one.finish_reason is other.finish_reason
        torch.testing.assert_close(one.policy_logp, other.policy_logp, atol=2e-5, rtol=0)


def test_responses_are_those_of_rounds(engine: AsyncEpisodes, expected: list[Completion]) -> None:
    plain = GenerateRequest((5, 6, 7), (1, 2))
    played, other = engine.generate([REQUEST, plain], SAMPLING)
    check_same(played, expected)
    assert all(one.episode is None for one in other)


def test_ended_in_the_middle_responses_go_on_where_they_stood(
    engine: AsyncEpisodes, fleet: OneByOne, expected: list[Completion]
) -> None:
    work, tally, cut = PromptWork(PROBLEM, REQUEST), Tally(), set[tuple[int, int]]()
    for turn in range(80):
        # Every second time the engine answers before it is ended: a turn or two.
        (fleet.held.set if turn % 2 else fleet.held.clear)()
        work.begin(engine, SAMPLING, tally)
        time.sleep(0.02)
        assert work.future is not None
        engine.abort([work.future])
        work.settle(tally, aborted=True)
        if work.complete:
            break
        left = work.record()
        parts = [left.responses[index] for index in left.open]
        cut |= {(part.length, len(turns_of(part))) for part in parts if part is not None}
    assert any(length for length, _ in cut) and any(turns for _, turns in cut), "nothing was cut off in the middle"
    if not work.complete:
        _finished(work, engine)
    check_same(work.completions, expected)


def test_a_longer_limit_of_tokens_lets_cut_responses_go_on(
    engine: AsyncEpisodes, fleet: OneByOne, expected: list[Completion]
) -> None:
    """Those whose environment's answer found no room too; all but the first had ended under the limit before."""
    fleet.held.set()
    early = 0
    for limit in (8, 10, 13):
        short = replace(SAMPLING, max_tokens=limit)
        done = engine.submit(REQUEST, short).result()
        early += sum(one.finish_reason is FinishReason.LENGTH and one.length < limit for one in done)
        before = Unfinished(0, 0, (None, *done[1:]), (0,), SampledWith.of(short, None))
        work = PromptWork(PROBLEM, REQUEST, before)
        work.go_on_with(SAMPLING)
        check_same(_finished(work, engine), expected)
    assert early


def test_under_a_shorter_limit_of_tokens_an_open_response_ends_with_its_environments_verdict(
    engine: AsyncEpisodes, fleet: OneByOne
) -> None:
    fleet.held.set()
    done = engine.submit(REQUEST, replace(SAMPLING, max_tokens=14)).result()
    open_ = [replace(one, finish_reason=FinishReason.ABORT) for one in done if one.finish_reason is FinishReason.LENGTH]
    before = Unfinished(0, 0, tuple(open_), tuple(range(len(open_))), SampledWith.of(SAMPLING, None))
    work = PromptWork(PROBLEM, replace(REQUEST, seeds=tuple(one.seed for one in open_)), before)
    work.go_on_with(replace(SAMPLING, max_tokens=8))
    for one, half in zip(_finished(work, engine, max_tokens=8), open_, strict=True):
        assert one.finish_reason is FinishReason.LENGTH and one.tokens.tolist() == half.tokens.tolist()
        assert one.episode is not None and half.episode is not None and one.episode.turns == half.episode.turns
        verdict = one.episode.verdict
        assert verdict is not None and verdict.reward == sum(turn.reward for turn in one.episode.turns)


def _finished(work: PromptWork, engine: AsyncEpisodes, max_tokens: int = SAMPLING.max_tokens) -> list[Completion]:
    work.begin(engine, replace(SAMPLING, max_tokens=max_tokens), Tally())
    assert work.future is not None
    wait([work.future])
    work.settle(Tally())
    return work.completions


def test_a_turn_over_which_an_engine_is_lost_is_asked_for_once_more(
    engine: AsyncEpisodes, fleet: OneByOne, expected: list[Completion]
) -> None:
    fleet.lose = 1
    check_same(engine.submit(REQUEST, SAMPLING).result(), expected)
    fleet.lose = 1000
    with pytest.raises(NotSampled, match="the engine was lost"):
        engine.submit(REQUEST, SAMPLING).result()


def test_an_environment_that_hangs_does_not_hold_up_the_end(engine: AsyncEpisodes) -> None:
    Sleeps.asleep.clear()
    future = engine.submit(replace(REQUEST, episode=Game("sleeps")), SAMPLING)
    assert Sleeps.asleep.wait(HANG_S)
    engine.abort([future])
    cut = future.result(timeout=0)
    assert {one.finish_reason for one in cut} <= {FinishReason.ABORT, FinishReason.LENGTH}
    assert any(one.tokens.numel() and one.tokens[-1] in SAMPLING.stop_token_ids for one in cut)


def test_closing_an_environment_does_not_hold_up_the_end(engine: AsyncEpisodes, fleet: OneByOne) -> None:
    fleet.held.clear()
    future = engine.submit(replace(REQUEST, episode=Game("lingers")), SAMPLING)
    start = time.monotonic()
    engine.abort([future])
    assert time.monotonic() - start < 30 and future.done()


def test_a_coroutine_that_blocks_ends_the_run(fleet: OneByOne) -> None:
    RELEASED.clear()
    engine = AsyncEpisodes(fleet, LETTERS, EpisodesConfig(step_timeout_s=0.2))
    with pytest.raises(UserError, match=r"at .*games.py:\d+ in step"):
        engine.generate([replace(REQUEST, episode=Game("blocks"))], SAMPLING)
    RELEASED.set()
    engine.end()
