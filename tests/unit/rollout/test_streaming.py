"""Streams of requests: each is answered when it ends, the next takes its room, and samples stay the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from waiting import HANG_S, wait_until

from megasharp.common.errors import NotSampled, UserError
from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.common.signals import SaveAsked
from megasharp.evals.stored_samples import read_samples
from megasharp.rollout.step_request import streamed
from megasharp.rollout.streaming import Answer, Asked, Ended, Stream
from tests.unit.evals.rule_engine import RuleEngine, run, store_of

SAMPLING = SamplingParams(max_tokens=4)


class Taking:
    """Takes requests, and answers each when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[GenerateRequest, Answer]] = []
        self.aborted: list[Answer] = []
        self.dropped: list[Answer] = []

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Answer:
        self.asked.append((request, Future()))
        return self.asked[-1][1]

    def abort(self, futures: Sequence[Answer]) -> None:
        self.aborted += futures

    def drop(self, futures: Sequence[Answer]) -> None:
        self.dropped += futures

    def numbers(self) -> list[int]:
        return [request.tokens[0] for request, _ in self.asked]

    def answer(self, number: int, error: Exception | None = None) -> None:
        ((request, future),) = [one for one in self.asked if one[0].tokens[0] == number]
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result([Completion.unsampled(seed, SAMPLING) for seed in request.seeds])


def asks(*numbers: int) -> list[Asked]:
    return [(GenerateRequest((number,), (2 * number, 2 * number + 1)), SAMPLING) for number in numbers]


def nothing() -> None:
    pass


def in_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def test_a_slow_request_stalls_no_other_and_no_more_than_fits_is_in_flight() -> None:
    """Four samples at once, two a request: one that ends gives its room to the next, while request 0 is the slowest."""
    engine = Taking()
    found: list[int] = []

    def consume() -> None:
        with Stream(engine, asks(0, 1, 2, 3, 4), 4, nothing) as stream:
            for place, (request, _), sampled in stream:
                assert isinstance(sampled, list) and place == request.tokens[0]
                assert [completion.seed for completion in sampled] == list(request.seeds)
                found.append(place)

    thread = in_background(consume)
    for begun, answered in (([0, 1], 1), ([0, 1, 2], 2), ([0, 1, 2, 3], 3), ([0, 1, 2, 3, 4], 4)):
        wait_until(lambda expected=begun: engine.numbers() == expected)
        assert found == begun[1:-1]
        engine.answer(answered)
    wait_until(lambda: found == [1, 2, 3, 4])
    engine.answer(0)
    thread.join(HANG_S)
    assert found == [1, 2, 3, 4, 0] and engine.dropped == engine.aborted == []


def test_requests_are_taken_from_an_endless_source_only_as_they_begin() -> None:
    """The engine has the next one while the caller is busy with this one."""
    engine = Taking()
    taken = count()
    with Stream(engine, (asks(next(taken))[0] for _ in count()), 2, nothing) as stream:
        in_background(lambda: wait_until(lambda: bool(engine.asked)) or engine.answer(0))
        next(iter(stream))
        # The next but one was looked at, for there may have been room.
        assert engine.numbers() == [0, 1] and next(taken) == 3
    assert engine.dropped == [engine.asked[1][1]]


def test_a_request_to_save_ends_what_is_in_flight_and_other_errors_wait_for_nothing() -> None:
    for error, ended in ((SaveAsked(), "aborted"), (UserError("the disk is full"), "dropped")):
        engine = Taking()
        with pytest.raises(type(error)), Stream(engine, asks(0, 1), 9, nothing) as stream:
            in_background(lambda asked=engine: wait_until(lambda: bool(asked.asked)) or asked.answer(0))
            next(iter(stream))
            raise error
        assert (engine.aborted, engine.dropped)[ended == "dropped"] == [engine.asked[1][1]]
        assert (engine.dropped, engine.aborted)[ended == "dropped"] == []


def test_what_is_not_sampled_is_an_answer_and_another_error_goes_through() -> None:
    engine = Taking()
    with pytest.raises(UserError, match="no engine is left"), Stream(engine, asks(0, 1), 9, nothing) as stream:

        def answer() -> None:
            wait_until(lambda: len(engine.asked) == 2)
            engine.answer(0, NotSampled("too long"))
            engine.answer(1, UserError("no engine is left"))

        in_background(answer)
        answers = iter(stream)
        place, _, refusal = next(answers)
        assert place == 0 and isinstance(refusal, NotSampled)
        next(answers)


def test_an_engine_that_answers_many_together_gets_slices_of_one_sampling() -> None:
    """At most four samples each, or one larger request; places go on through them."""
    engine = RuleEngine()
    greedy = replace(SAMPLING, temperature=0.0)
    large = GenerateRequest((9,), tuple(range(20, 27)))
    asked = [*asks(0, 1, 2), (large, SAMPLING), (GenerateRequest((8,), (30,)), greedy), *asks(3)]
    with streamed(engine, iter(asked), 4) as ended:
        places = {place: [completion.seed for completion in completions] for place, completions in ended}
    assert places == {place: list(request.seeds) for place, (request, _) in enumerate(asked)}
    assert [[request.tokens[0] for request in requests] for requests, _ in engine.calls] == [[0, 1], [2], [9], [8], [3]]
    assert [sampling for _, sampling in engine.calls] == [SAMPLING, SAMPLING, SAMPLING, greedy, SAMPLING]


class StreamingRules(RuleEngine):
    """Answers by the rule, each request from a thread, in no order; `left` requests, then it is cut off."""

    def __init__(self, left: int = 1000) -> None:
        super().__init__()
        self.left = left

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Answer:
        future: Answer = Future()
        answer = super().generate([request], sampling)[0]
        threading.Timer(0.004 if request.seeds[0] % 3 else 0.0, future.set_result, (answer,)).start()
        return future

    def abort(self, futures: Sequence[Answer]) -> None: ...

    def drop(self, futures: Sequence[Answer]) -> None: ...

    @property
    def capacity(self) -> int:
        return 7

    @contextmanager
    def stream(self, asked: Iterator[Asked], at_once: float) -> Iterator[Iterator[Ended]]:
        def ended(stream: Stream) -> Iterator[Ended]:
            for place, _, sampled in stream:
                if not self.left:
                    raise UserError("killed")
                self.left -= 1
                assert isinstance(sampled, list)
                yield place, sampled

        with Stream(self, asked, at_once, nothing) as stream:
            yield ended(stream)


def test_an_evaluation_that_streams_has_the_figures_and_samples_of_one_that_does_not(tmp_path: Path) -> None:
    """Also where it was cut off in between, and went on."""
    plain = store_of(tmp_path / "plain")
    expected = run(store=plain)
    with pytest.raises(UserError, match="killed"):
        run(StreamingRules(9), store=store_of(tmp_path / "cut"))
    assert 0 < len(list(read_samples(tmp_path / "cut", "tiny"))) < 66
    cut = store_of(tmp_path / "cut")
    result = run(StreamingRules(), store=cut)
    assert replace(result, seconds=0.0) == replace(expected, seconds=0.0)
    for store in (plain, cut):
        store.finish()
    one, other = (
        [replace(each, sampled_s=0.0, judged_s=0.0) for each in read_samples(tmp_path / name, "tiny")]
        for name in ("plain", "cut")
    )
    assert one == other and len(one) == 66
