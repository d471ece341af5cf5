"""Batches of requests: the next begins while the last waits for its slowest, and what is answered stays the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import HANG_S, wait_until

from megasharp.common.errors import NotSampled, UserError
from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.common.signals import SaveAsked
from megasharp.evals.evaluate import Progress
from megasharp.rollout.streaming import Answer, Batch, Stream
from tests.unit.evals.rule_engine import RuleEngine, run

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


def batch(*numbers: int) -> Batch:
    return [GenerateRequest((number,), (2 * number, 2 * number + 1)) for number in numbers], SAMPLING


def nothing() -> None:
    pass


def in_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def test_the_next_batch_begins_as_the_last_ends_and_no_more_than_fits_is_in_flight() -> None:
    """Four samples at once, two a request: request 2 takes the place of 1, and 3 that of 2, while 0 is the slowest."""
    engine = Taking()
    found: list[list[int]] = []

    def consume() -> None:
        with Stream(engine, [batch(0, 1), batch(2, 3), batch(4)], 4, nothing) as stream:
            for (requests, _), sampled in stream:
                seeds = [completion.seed for some in sampled if isinstance(some, list) for completion in some]
                assert seeds == [seed for request in requests for seed in request.seeds]
                found.append(seeds)

    thread = in_background(consume)
    for begun, answered in (([0, 1], 1), ([0, 1, 2], 2), ([0, 1, 2, 3], 3)):
        wait_until(lambda expected=begun: engine.numbers() == expected)
        assert found == []
        engine.answer(answered)
    # There is room, but the third batch waits for the first: what a kill loses stays small.
    wait_until(lambda: all(future.done() for _, future in engine.asked[1:]))
    assert engine.numbers() == [0, 1, 2, 3]
    engine.answer(0)
    wait_until(lambda: engine.numbers() == [0, 1, 2, 3, 4])
    engine.answer(4)
    thread.join(HANG_S)
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and engine.dropped == engine.aborted == []


def test_the_engine_has_the_next_batch_while_the_caller_judges_this_one() -> None:
    engine = Taking()
    with Stream(engine, [batch(0), batch(1), batch(2)], 2, nothing) as stream:
        batches = iter(stream)
        in_background(lambda: wait_until(lambda: bool(engine.asked)) or engine.answer(0))
        next(batches)
        assert engine.numbers() == [0, 1]
    assert engine.dropped == [engine.asked[1][1]]


def test_a_request_to_save_ends_what_is_in_flight_and_other_errors_wait_for_nothing() -> None:
    for error, ended in ((SaveAsked(), "aborted"), (UserError("the disk is full"), "dropped")):
        engine = Taking()
        with (
            pytest.raises(type(error)),
            Stream(engine, [batch(0), batch(1)], 9, nothing) as stream,
        ):
            in_background(lambda asked=engine: wait_until(lambda: bool(asked.asked)) or asked.answer(0))
            next(iter(stream))
            raise error
        assert (engine.aborted, engine.dropped)[ended == "dropped"] == [engine.asked[1][1]]
        assert (engine.dropped, engine.aborted)[ended == "dropped"] == []


def test_what_is_not_sampled_is_an_answer_and_another_error_goes_through() -> None:
    engine = Taking()
    with (
        pytest.raises(UserError, match="no engine is left"),
        Stream(engine, [batch(0), batch(1)], 9, nothing) as stream,
    ):

        def answer() -> None:
            wait_until(lambda: len(engine.asked) == 2)
            engine.answer(0, NotSampled("too long"))
            engine.answer(1, UserError("no engine is left"))

        in_background(answer)
        answers = iter(stream)
        _, (refusal,) = next(answers)
        assert isinstance(refusal, NotSampled)
        next(answers)


class StreamingRules(RuleEngine):
    """Answers by the rule, each request from a thread, in no order; `left` batches are whole, then cut."""

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

    @contextmanager
    def stream(self, batches: Iterator[Batch], at_once: float) -> Iterator[Iterator[list[list[Completion]]]]:
        def answers(stream: Stream) -> Iterator[list[list[Completion]]]:
            for _, sampled in stream:
                if not self.left:
                    raise UserError("killed")
                self.left -= 1
                yield [one for one in sampled if isinstance(one, list)]

        with Stream(self, batches, at_once, nothing) as stream:
            yield answers(stream)


def test_an_evaluation_that_streams_has_the_figures_and_files_of_one_that_does_not(tmp_path: Path) -> None:
    """Also where it was cut off in between, and went on."""
    left = 5
    identity = {"weights": "abc"}
    plain, streamed = Progress(tmp_path / "plain", identity), Progress(tmp_path / "streamed", identity)
    expected = run(chunk_samples=7, progress=plain)
    with pytest.raises(UserError, match="killed"):
        run(StreamingRules(left), chunk_samples=7, progress=streamed)
    assert len(list((tmp_path / "streamed").glob("*.parquet"))) == left
    result = run(StreamingRules(), chunk_samples=7, progress=streamed)
    assert replace(result, seconds=0.0) == replace(expected, seconds=0.0)
    names = sorted(path.name for path in (tmp_path / "plain").glob("*.parquet"))
    assert names == sorted(path.name for path in (tmp_path / "streamed").glob("*.parquet")) and len(names) == 10
    for name in names:
        one, other = plain.read(name.removesuffix(".parquet")), streamed.read(name.removesuffix(".parquet"))
        assert one is not None and other is not None and one[0] == other[0]
