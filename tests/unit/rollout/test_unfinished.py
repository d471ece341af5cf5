"""Prompts that no step has trained on yet, over a stop: what was sampled of them comes back and is used."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from waiting import HANG_S, wait_until

from megasharp.checkpoint.rollout_store import read_unfinished, write_unfinished
from megasharp.common import signals
from megasharp.common.records import (
    Completion,
    Episode,
    FinishReason,
    GenerateRequest,
    Group,
    Outcome,
    Prompt,
    SamplingParams,
    Turn,
    Verdict,
    VersionSpan,
)
from megasharp.config.rollout import RolloutConfig
from megasharp.rollout.async_collector import AsyncRollouts
from megasharp.rollout.batch_collector import Rollouts
from megasharp.rollout.in_flight import SampledWith, Unfinished
from megasharp.rollout.step_request import GroupMaker, response_seed
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.judge import DirectJudge, TaskItem
from megasharp.tasks.stream import PromptStream, tokenize_prompts
from tests.unit.rollout.standin_engine import Delay, StandInEngine
from tests.unit.rollout.test_async_collector import (
    QUICK,
    SAMPLING,
    Held,
    Prompts,
    check_whole,
    dropping,
    numbers,
    order,
    pending,
    right,
    rollouts,
)

LOGP = torch.tensor([-0.1, -1.0 / 3.0, -1e-30], dtype=torch.float32)


def completion(**changes: object) -> Completion:
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))
    base = Completion(torch.tensor([1, 151_935, 7]), LOGP, 2 * LOGP, None, spans, FinishReason.STOP, 2**63 - 1)
    return replace(base, **changes)  # type: ignore[arg-type]


def equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Completion) and isinstance(other, Completion):
        return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(Completion))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def same(one: Unfinished, other: Unfinished) -> bool:
    return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(Unfinished))


def test_the_file_gives_back_every_bit(tmp_path: Path) -> None:
    moved = torch.tensor([True, False, True])
    with_memory = completion(memory_logp=3 * LOGP, argmax_moved=moved, calibration_kl=LOGP.abs())
    routed = torch.arange(5 * 2 * 3).reshape(5, 2, 3)
    small, large = completion(experts=routed.to(torch.uint8)), completion(experts=(300 + routed).to(torch.int16))
    empty = replace(completion(), tokens=torch.empty(0, dtype=torch.int64), version_spans=())
    open_episode = Episode((Turn(0, 1, 2, 1.0 / 3.0),))
    verdict = Verdict(Outcome.CORRECT, 1.0 / 3.0, "u", "two moves")
    ended = Episode((Turn(0, 1, 2, 1.0 / 3.0), Turn(2, 3, 3, 0.0)), verdict)
    prompts = [
        Unfinished(0, 5, (completion(), None), (1,), SampledWith(12, memory=False)),
        Unfinished(0, 7, (completion(episode=ended), completion(episode=open_episode)), (1,), SampledWith(12, False)),
        Unfinished(0, 6, (None, None), (0, 1), None),
        Unfinished(0, 8, (small, large, completion(experts=routed[:0].to(torch.uint8))), (), SampledWith(12, False)),
        Unfinished(1, 5, (with_memory, with_memory), (), SampledWith(9, memory=True, begun=8)),
        Unfinished(1, 0, (replace(empty, sampler_logp=LOGP[:0], policy_logp=LOGP[:0]), None), (0, 1), None),
    ]
    write_unfinished(tmp_path, prompts)
    found = read_unfinished(tmp_path)
    assert len(found) == 6 and all(map(same, found, prompts))


def test_no_file_where_nothing_was_sampled(tmp_path: Path) -> None:
    write_unfinished(tmp_path, [Unfinished(0, 6, (None, None), (0, 1), None)])
    assert list(tmp_path.iterdir()) == [] and read_unfinished(tmp_path) == ()


def test_log_probs_that_the_file_would_round_are_not_written(tmp_path: Path) -> None:
    double = completion(sampler_logp=LOGP.double())
    with pytest.raises(AssertionError, match="would round"):
        write_unfinished(tmp_path, [Unfinished(0, 0, (double,), (), SampledWith(12, memory=False))])


def resumed(
    old: AsyncRollouts, engine: StandInEngine, source: Prompts, folder: Path, **settings: object
) -> AsyncRollouts:
    """A second process: the stream hands the unfinished prompts out first, the file says what is there of them."""
    left = old.unfinished()
    folder.mkdir()
    write_unfinished(folder, left)
    collector = rollouts(engine, **settings)
    before, source.taken = source.taken, left[0].position if left else source.taken
    assert [prompt.position for prompt in left] == list(range(source.taken, before))
    collector.take_up(source, read_unfinished(folder) or left)
    assert source.taken == before
    return collector


def resumed_with_all_sampled_ahead(folder: Path, version: int) -> tuple[AsyncRollouts, StandInEngine, Prompts]:
    """A second process, whose engine serves `version`, after one that sampled a whole step ahead by version 0."""
    settings = {"max_staleness": 1, "stragglers": "keep"}
    engine, source = StandInEngine(lambda _: QUICK), Prompts()
    first = rollouts(engine, **settings)
    first.collect(source, order(1))
    wait_until(lambda: engine.running == set())
    other = StandInEngine(lambda _: QUICK)
    other.version = version
    return resumed(first, other, source, folder / "c", **settings), other, source


def test_what_was_sampled_ahead_is_trained_and_not_sampled_again(tmp_path: Path) -> None:
    second, other, source = resumed_with_all_sampled_ahead(tmp_path, version=1)
    found = second.collect(source, order(2, last=True))
    assert numbers(found) == [4, 5, 6, 7] and other.asked == []
    assert found.metrics["rollout/staleness_mean"] == 1.0
    for group in found.groups:
        check_whole(group, oldest=0)


def test_parts_of_responses_go_on_and_what_was_in_flight_is_asked_for_anew(tmp_path: Path) -> None:
    settings = {"max_staleness": 1, "oversample": 0.5}
    engine, source = Held({4, 5}), Prompts()
    first = rollouts(engine, **settings)
    assert numbers(first.collect(source, order(1))) == [0, 1, 2, 3]
    other = StandInEngine(lambda _: QUICK)
    other.version = 1
    second = resumed(first, other, source, tmp_path / "c", **settings)
    assert pending(second) == [4, 5]
    found = second.collect(source, order(2, wanted=2))
    begun = [request for request in other.asked if any(request.begun)]
    assert begun and all(len(request.seeds) <= 3 for request in begun)
    for group in found.groups:
        check_whole(group, oldest=0)

    keep = {"max_staleness": 1, "stragglers": "keep"}
    straggling = StandInEngine(lambda n: 3600.0 if n == 5 else QUICK)
    source = Prompts()
    third = rollouts(straggling, **keep)
    third.collect(source, order(1))
    wait_until(lambda: len(straggling.running) == 1)
    other = StandInEngine(lambda _: QUICK)
    other.version = 1
    fourth = resumed(third, other, source, tmp_path / "d", **keep)
    assert numbers(fourth.collect(source, order(2, last=True))) == [4, 5, 6, 7]
    assert [request.tokens for request in other.asked] == [(5,)]


def test_what_another_release_would_have_thrown_away_trains_after_a_stop(tmp_path: Path) -> None:
    """A step later than its settings allow: nothing is sampled again, and the row counts it."""
    second, other, source = resumed_with_all_sampled_ahead(tmp_path, version=2)
    found = second.collect(source, order(2, last=True))
    assert numbers(found) == [4, 5, 6, 7] and other.asked == []
    assert (found.metrics["rollout/stale_dropped"], found.metrics["rollout/overdue"]) == (0, 4)


@pytest.mark.parametrize("change", ["another seed", "another prompt", "fewer responses"])
def test_what_was_sampled_for_another_prompt_or_seed_is_sampled_anew(tmp_path: Path, change: str) -> None:
    settings = {"max_staleness": 1, "stragglers": "keep"}
    engine, source = StandInEngine(lambda _: QUICK), Prompts()
    first = rollouts(engine, **settings)
    first.collect(source, order(1))
    wait_until(lambda: engine.running == set())
    write_unfinished(tmp_path, first.unfinished())

    class Others(Prompts):
        def take(self, count: int) -> list[Prompt]:
            return [replace(p, id=f"other {p.id}") if p.position == 5 else p for p in super().take(count)]

    count, seed = (2, 5) if change == "fewer responses" else (3, 6 if change == "another seed" else 5)
    maker = GroupMaker(DirectJudge({"echo": right}), lambda rows: ["x"] * len(rows), SAMPLING, count, seed)
    other = StandInEngine(lambda _: QUICK)
    other.version = 1
    second = AsyncRollouts(other, maker, RolloutConfig(**settings))  # type: ignore[arg-type]
    source = Others() if change == "another prompt" else Prompts()
    source.taken = 4
    anew = [5] if change == "another prompt" else [4, 5, 6, 7]
    assert second.take_up(source, read_unfinished(tmp_path)) == len(anew)
    found = second.collect(source, order(2, last=True))
    assert [request.tokens for request in other.asked] == [(n,) for n in anew]
    for group in found.groups:
        expected = maker.request(group.prompt).seeds
        assert tuple(response.completion.seed for response in group.responses) == expected


@pytest.mark.parametrize("recorded", [True, False])
def test_what_was_sampled_without_experts_is_sampled_anew_where_they_are_replayed(recorded: bool) -> None:
    so_far = [
        Unfinished(0, n, (None, record(n, 1, recorded), record(n, 2, recorded)), (0,), SampledWith(12, False))
        for n in (0, 1)
    ]
    collector = rollouts(StandInEngine(lambda _: QUICK))
    assert collector.take_up(Prompts(), so_far) == 0
    collector = rollouts(StandInEngine(lambda _: QUICK))
    collector._maker = replace(collector._maker, needs_experts=True)
    assert collector.take_up(Prompts(), so_far) == (0 if recorded else 2)
    kept = [one is not None for prompt in collector.unfinished() for one in prompt.responses]
    assert kept == [False, recorded, recorded] * 2


def record(prompt: int, index: int, recorded: bool) -> Completion:
    seed = response_seed(5, f"p{prompt}", 0, index)
    return completion(seed=seed, experts=torch.zeros(3, 2, 2, dtype=torch.uint8) if recorded else None)


@contextmanager
def usr1_when(condition: threading.Event) -> Iterator[None]:
    """SIGUSR1 to this process as soon as the event is set."""

    def send() -> None:
        assert condition.wait(HANG_S)
        os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        sender.join()


@pytest.fixture
def heard() -> Iterator[None]:
    with signals.save_heard():
        yield
    signals._State.save = None
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.usefixtures("heard")
def test_a_step_that_a_save_cuts_short_loses_nothing_and_its_groups_are_not_sampled_again(tmp_path: Path) -> None:
    """Strictly on-policy: the resumed run has the weights that sampled them."""
    whole = rollouts(StandInEngine(lambda _: QUICK)).collect(
        Prompts(), order(select=dropping(lambda n: n == 1), refill_rounds=2)
    )
    done, answered = threading.Event(), set()

    class Engine(StandInEngine):
        def _answer(self, future, request, sampling):  # type: ignore[no-untyped-def]
            super()._answer(future, request, sampling)
            answered.add(request.tokens[0])
            if {0, 1, 3} <= answered:
                done.set()

    def delay(n: int) -> float:
        if n == 2:
            wait_until(lambda: engine._ended)
        return QUICK

    engine, source = Engine(delay), Prompts()
    first = rollouts(engine)
    with usr1_when(done), pytest.raises(signals.SaveAsked):
        first.collect(source, order(select=dropping(lambda n: n == 1), refill_rounds=2))
    assert pending(first) == list(range(source.taken)) and source.taken in (4, 5)
    signals._State.save = None
    other = StandInEngine(lambda _: QUICK)
    second = resumed(first, other, source, tmp_path / "c")
    found = second.collect(source, order(select=dropping(lambda n: n == 1), refill_rounds=2))
    assert sorted(request.tokens[0] for request in other.asked) in ([2], [2, 4])
    assert [(g.id, g.prompt.position, g.dropped_reason) for g in found.groups] == [
        (g.id, g.prompt.position, g.dropped_reason) for g in whole.groups
    ]
    for group, twin in zip(found.groups, whole.groups, strict=True):
        for mine, its in zip(group.responses, twin.responses, strict=True):
            assert equal(mine.completion.tokens, its.completion.tokens)


@pytest.mark.usefixtures("heard")
def test_what_is_in_flight_when_a_save_is_asked_for_is_ended_and_its_parts_go_on(tmp_path: Path) -> None:
    """Whoever saves may need the engines' devices: nothing runs there afterwards."""
    begun = threading.Event()

    class Engine(Held):
        def _wait(self, prompt: int) -> float:
            if self._steps.get(prompt) == 1:
                begun.set()
            return super()._wait(prompt)

    engine, source = Engine({0, 1, 2, 3}), Prompts()
    first = rollouts(engine)
    with usr1_when(begun), pytest.raises(signals.SaveAsked):
        first.collect(source, order())
    assert engine.running == set()
    signals._State.save = None
    other = StandInEngine(lambda _: QUICK)
    second = resumed(first, other, source, tmp_path / "c")
    found = second.collect(source, order(last=True))
    assert numbers(found) == [0, 1, 2, 3]
    assert any(any(request.begun) for request in other.asked), "no part was kept"
    for group in found.groups:
        check_whole(group, oldest=0)


@pytest.mark.usefixtures("heard")
def test_work_on_finished_groups_gets_the_kept_ones_once_and_a_save_cuts_it_short(tmp_path: Path) -> None:
    """Pieces without end, while the last prompt is held: the signal comes in the first, and no other is begun.

    A collector that worked on until nothing was left would never save.
    """

    class Work:
        def __init__(self) -> None:
            self.groups: list[tuple[str, str | None]] = []
            self.pieces = 0

        def finished(self, group: Group) -> None:
            self.groups.append((group.id, group.dropped_reason))

        def work(self) -> bool:
            if len(self.groups) == 3:
                self.pieces += 1
                os.kill(os.getpid(), signal.SIGUSR1)
            return len(self.groups) == 3

    select = dropping(lambda n: n == 1)
    engine, source, work = Held({3}), Prompts(), Work()
    first = rollouts(engine)
    with pytest.raises(signals.SaveAsked):
        first.collect(source, order(select=select, refill_rounds=1, meanwhile=work))
    assert work.pieces == 1 and sorted(work.groups) == [("step1-0", None), ("step1-2", None), ("step1-4", None)]
    assert pending(first) == [0, 1, 2, 3, 4]
    signals._State.save = None
    other, again = StandInEngine(lambda _: QUICK), Work()
    again.work = lambda: False  # type: ignore[method-assign]
    second = resumed(first, other, source, tmp_path / "c")
    found = second.collect(source, order(select=select, refill_rounds=1, meanwhile=again))
    assert {request.tokens[0] for request in other.asked} == {3}
    assert sorted(again.groups) == [(group.id, None) for group in found.groups if group.dropped_reason is None]


@pytest.mark.usefixtures("heard")
def test_round_by_round_a_cut_step_gives_its_prompts_back() -> None:
    class Engine(StandInEngine):
        def generate(self, requests: list[GenerateRequest], sampling: SamplingParams):  # type: ignore[no-untyped-def,override]
            os.kill(os.getpid(), signal.SIGUSR1)
            raise AssertionError("the signal came too late")

    maker = GroupMaker(DirectJudge({"echo": right}), lambda rows: ["x"] * len(rows), SAMPLING, 3, seed=5)
    collector, source = Rollouts(Engine(lambda _: QUICK), maker), Prompts()
    source.take(7)
    assert collector.unfinished() == ()
    with pytest.raises(signals.SaveAsked):
        collector.collect(source, order())
    assert [prompt.place for prompt in collector.unfinished()] == [(0, n) for n in range(7, 11)]
    assert all(prompt.open == (0, 1, 2) and prompt.sampled_with is None for prompt in collector.unfinished())


def test_a_resumed_run_trains_on_every_prompt_once(tmp_path: Path) -> None:
    """Stopped after any step, with oversampling: what was in flight comes first again."""
    items = [TaskItem(f"i{n}", "echo", str(n), CountdownAnswer((n,), n), "s") for n in range(200)]

    class Numbers:
        def encode(self, text: str) -> tuple[int, ...]:
            return (int(text),)

        plain = encode

    def stream() -> PromptStream:
        return PromptStream(tokenize_prompts(items, Numbers(), 4), seed=3)

    chance = random.Random(0)
    paces = [chance.choice([0.0001, 0.003]) for _ in items]
    pace: Delay = lambda n: paces[n]  # noqa: E731
    trained: list[str] = []
    source, collector = stream(), rollouts(StandInEngine(pace), oversample=1.0, max_staleness=1)
    for step in range(1, 7):
        trained += [group.prompt.id for group in collector.collect(source, order(step)).groups]
        if step in (2, 4):
            left, cursor = collector.unfinished(), source.cursor
            waiting = [(place.epoch, place.position) for place in source.pending]
            (folder := tmp_path / str(step)).mkdir()
            write_unfinished(folder, left)
            source = stream()
            source.restore(cursor, [type(cursor)(*place) for place in (*(u.place for u in left), *waiting)])
            collector = rollouts(StandInEngine(pace), oversample=1.0, max_staleness=1)
            collector.take_up(source, read_unfinished(folder))
    assert len(trained) == len(set(trained)) == 24
    in_order = [prompt.id for prompt in stream().take(source.cursor.position)]
    left_over = [*collector.unfinished(), *source.pending]
    assert sorted(trained + [in_order[place.position] for place in left_over]) == sorted(in_order)
