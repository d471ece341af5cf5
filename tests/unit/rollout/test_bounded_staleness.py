"""Nothing is thrown away as stale: what is due is waited for, what is due later waits, over a scripted engine.

The engine has no clock: the collector's wait calls it, and it answers what the test's script says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from cases import each_case

from megasharp.common.errors import EnginesLost
from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams, VersionSpan
from megasharp.common.signals import SaveAsked
from megasharp.config.rollout import RolloutConfig
from megasharp.rollout.async_collector import AsyncRollouts
from megasharp.rollout.in_flight import PromptWork, SampledWith, Unfinished
from megasharp.rollout.step_request import Collected, GroupMaker
from megasharp.tasks.judge import DirectJudge
from tests.unit.rollout.standin_engine import StandInEngine, token
from tests.unit.rollout.test_async_collector import Mu, Prompts, dropping, numbers, order, pending, right, versions_of

LIMIT = 12
Answers = Future[list[Completion]]


@dataclass(slots=True)
class Asked:
    """A request in flight; each of its responses has grown by so many tokens, by these versions."""

    request: GenerateRequest
    sampling: SamplingParams
    versions: list[int]

    def completions(self) -> list[Completion]:
        begun = [len(tokens) for tokens in self.request.begun] or [0] * len(self.request.seeds)
        pairs = zip(self.request.seeds, begun, strict=True)
        return [grown(seed, start, self.versions, self.sampling) for seed, start in pairs]


def grown(seed: int, begun: int, versions: Sequence[int], sampling: SamplingParams) -> Completion:
    """Tokens `begun` and on, up to the response's own end or the limit."""
    whole = 1 + seed % 20
    end = min(begun + len(versions), whole, sampling.max_tokens)
    spans = tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions[: end - begun]))
    logp = -torch.tensor([span.version for span in spans], dtype=torch.float32)
    reason = FinishReason.ABORT
    if end == min(whole, sampling.max_tokens):
        reason = FinishReason.STOP if end == whole else FinishReason.LENGTH
    memory = None if sampling.memory_mu is None else logp
    tokens = torch.tensor([token(seed, i) for i in range(begun, end)], dtype=torch.int64)
    return Completion(tokens, logp, logp, memory, spans, reason, seed)


class Scripted(StandInEngine):
    """`script` is called by each wait with the prompts in flight: it lets some grow, and ends some."""

    def __init__(self, script: Callable[[Scripted], None]) -> None:
        super().__init__(lambda _: 0.0)
        self.script = script
        self.flight: dict[Answers, Asked] = {}

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Answers:
        future: Answers = Future()
        self.asked.append(request)
        self.flight[future] = Asked(request, sampling, [])
        return future

    def abort(self, futures: Sequence[Answers]) -> None:
        for future in futures:
            if future in self.flight:
                future.set_result(self.flight.pop(future).completions())

    def grow(self, prompt: int, tokens: int) -> None:
        for asked in self.flight.values():
            if asked.request.tokens[0] == prompt:
                asked.versions += [self.version] * tokens

    def finish(self, *prompts: int) -> None:
        for future, asked in [*self.flight.items()]:
            if asked.request.tokens[0] in prompts:
                asked.versions += [self.version] * 20
                del self.flight[future]
                future.set_result(asked.completions())

    def prompts(self) -> list[int]:
        return [asked.request.tokens[0] for asked in self.flight.values()]

    def rollouts(self, **settings: object) -> AsyncRollouts:
        sampling = SamplingParams(max_tokens=LIMIT)
        maker = GroupMaker(DirectJudge({"echo": right}), lambda rows: ["x"] * len(rows), sampling, 2, seed=5)
        config = RolloutConfig(**settings)  # type: ignore[arg-type]
        return AsyncRollouts(self, maker, config, waiting=lambda _: self.script(self))


def all_but(*slow: int) -> Callable[[Scripted], None]:
    """Ends the prompt that came first, of those that are not slow; each slow one has two tokens by then."""

    def script(engine: Scripted) -> None:
        for prompt in slow:
            if not any(asked.versions for asked in engine.flight.values() if asked.request.tokens[0] == prompt):
                engine.grow(prompt, 2)
        engine.finish(next(prompt for prompt in engine.prompts() if prompt not in slow))

    return script


def test_a_step_waits_for_what_is_due_in_it_and_what_is_due_later_waits_in_the_backlog() -> None:
    engine, source = Scripted(all_but(0, 1)), Prompts()
    collector = engine.rollouts(oversample=0.5, max_staleness=1)
    assert numbers(collector.collect(source, order(1))) == [2, 3, 4, 5]
    assert pending(collector) == [0, 1] and not engine.flight
    engine.version = 1
    ended: list[int] = []

    def script(engine: Scripted) -> None:
        """The two that are due come last of all."""
        prompt = next((p for p in engine.prompts() if p > 1), engine.prompts()[0])
        ended.append(prompt)
        engine.finish(prompt)

    engine.script = script
    second = collector.collect(source, order(2))
    # Six run at once, two of the four places are for 0 and 1, and 8 and 9 are whole but begin later.
    assert ended == [6, 7, 8, 9, 0, 1] and numbers(second) == [0, 1, 6, 7]
    assert pending(collector) == [8, 9]
    assert second.metrics["rollout/staleness_max"] == 1 and second.metrics["rollout/stale_dropped"] == 0
    engine.version, asked = 2, len(engine.asked)
    third = collector.collect(source, order(3))
    assert {8, 9} <= set(numbers(third)) and {8, 9}.isdisjoint(r.tokens[0] for r in engine.asked[asked:])


@each_case(
    ("oversample", "staleness", "runs", "ahead"), [(4.0, 1, 8, 4), (4.0, 3, 16, 12), (0.5, 3, 6, 6), (0.0, 1, 4, 4)]
)
def test_no_more_begin_than_can_train_in_time(oversample: float, staleness: int, runs: int, ahead: int) -> None:
    most: list[int] = []

    def script(engine: Scripted) -> None:
        most.append(len(engine.flight))
        engine.finish(engine.prompts()[0])

    engine = Scripted(script)
    collector = engine.rollouts(oversample=oversample, max_staleness=staleness, stragglers="keep")
    collector.collect(Prompts(), order(1))
    assert max(most) == runs and len(engine.flight) == ahead


def test_what_settings_of_before_made_too_old_comes_first_and_is_counted() -> None:
    """A resume with a lower max_staleness: no sampled token is thrown away."""
    engine, source = Scripted(all_but(0, 1, 2)), Prompts()
    collector = engine.rollouts(oversample=1.0, max_staleness=4)
    assert numbers(collector.collect(source, order(1))) == [3, 4, 5, 6]
    left = collector.unfinished()
    assert [prompt.position for prompt in left] == [0, 1, 2, 7]
    engine.version, engine.script = 3, lambda engine: engine.finish(engine.prompts()[-1])
    resumed = engine.rollouts(max_staleness=1)

    class Given(Prompts):
        def take(self, count: int):  # type: ignore[no-untyped-def]
            self.taken = {0: 0, 3: 7, 8: 8}[self.taken] if count == 1 else self.taken
            return super().take(count)

    places = Given()
    assert resumed.take_up(places, left[:3]) == 0
    found = resumed.collect(places, order(4, wanted=2))
    assert numbers(found) == [1, 2] and pending(resumed) == [0]
    assert (found.metrics["rollout/overdue"], found.metrics["rollout/stale_dropped"]) == (2, 0)
    assert found.metrics["rollout/staleness_max"] == 3
    on_policy = engine.rollouts()
    assert on_policy.take_up(Prompts(), resumed.unfinished()) == 0
    found = on_policy.collect(places, order(5, wanted=1))
    assert (found.metrics["rollout/stale_dropped"], found.metrics["rollout/staleness_max"]) == (1, 0)


@each_case(("limit", "lengths"), [(8, [12, 10]), (16, [15, 16])])
def test_a_prompt_of_another_stage_goes_on_under_the_limit_of_the_next(limit: int, lengths: list[int]) -> None:
    """Longer: what the old limit had cut goes on too. Shorter: it ends where it stands."""
    engine = Scripted(lambda engine: engine.finish(engine.prompts()[-1]))
    engine.version = 1
    # The responses' own ends are at 15 and 18; the first was cut at 12, the second has ten tokens.
    seeds = (14, 17)
    parts = tuple(grown(seed, 0, [0] * n, SamplingParams(LIMIT)) for seed, n in zip(seeds, (12, 10), strict=True))
    record = Unfinished(0, 0, parts, open=(1,), sampled_with=SampledWith(LIMIT, memory=False))
    work = PromptWork(Prompts().take(1)[0], GenerateRequest((0,), seeds), record)
    collector = engine.rollouts(max_staleness=2)
    collector._backlog.append(work)
    found = collector.collect(Prompts(), order(2, wanted=1, max_tokens=limit))
    (group,) = found.groups
    assert (group.begun_limit, [response.length for response in group.responses]) == (LIMIT, lengths)
    for response in group.responses:
        cut = response.completion.seed + 1 > response.length
        assert response.completion.finish_reason is (FinishReason.LENGTH if cut else FinishReason.STOP)
    assert len(engine.asked) == (limit > LIMIT) and found.metrics["rollout/stale_dropped"] == 0


def test_what_is_in_flight_at_a_new_stage_goes_on_under_its_limit() -> None:
    engine, source = Scripted(all_but(0)), Prompts()
    collector = engine.rollouts(oversample=0.5, max_staleness=1, stragglers="keep")
    collector.collect(source, order(1))
    engine.version, engine.script = 1, lambda engine: engine.finish(engine.prompts()[-1])
    found = collector.collect(source, order(2, max_tokens=16, last=True))
    by_prompt = {group.prompt.position: group for group in found.groups}
    assert by_prompt[0].begun_limit == LIMIT
    for group in found.groups:
        assert group.begun_limit in (None, LIMIT)
        for response in group.responses:
            assert response.length == min(1 + response.completion.seed % 20, 16)


@each_case(("before", "after"), [(None, Mu()), (Mu(), None)])
@each_case("stragglers", ["abort", "keep"])
def test_parts_with_and_without_a_memory_network_make_one_response(
    before: Mu | None, after: Mu | None, stragglers: str
) -> None:
    """Its log-probs are known of one part only, so the response has none."""
    engine, source = Scripted(all_but(0)), Prompts()
    collector = engine.rollouts(oversample=0.5, max_staleness=1, stragglers=stragglers)
    collector.collect(source, order(1, memory=before))
    engine.version, engine.script = 1, lambda engine: engine.finish(engine.prompts()[-1])
    found = collector.collect(source, order(2, memory=after))
    responses = {g.prompt.position: [r.completion for r in g.responses] for g in found.groups}
    assert all(c.memory_logp is None and len({*versions_of(c)}) == 2 for c in responses[0] if c.tokens.numel() > 2)
    whole = [c for prompt, some in responses.items() if prompt > 5 for c in some]
    assert all((c.memory_logp is None) is (after is None) for c in whole)


class World:
    """A run over random answers, losses, saves, changes of the limit and of DLC, and engines that are aborted."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.staleness = chance.choice([1, 1, 2, 3])
        self.settings = {
            "oversample": chance.choice([0.0, 0.25, 0.5, 1.0, 3.0]),
            "max_staleness": self.staleness,
            "stragglers": chance.choice(["abort", "keep"]),
        }
        self.wanted = chance.choice([1, 2, 4])
        self.dropped = {n for n in range(2000) if chance.random() < chance.choice([0.0, 0.3])}
        self.lost: set[int] = set()
        self.engine = Scripted(self.script)
        self.source = Prompts()
        self.saves = True

    def script(self, engine: Scripted) -> None:
        chance = self.chance
        if self.saves and chance.random() < 0.02:
            raise SaveAsked
        for prompt in engine.prompts():
            engine.grow(prompt, chance.choice([0, 0, 1, 3]))
        prompt = chance.choice(engine.prompts())
        if prompt not in self.lost and chance.random() < 0.05:
            self.lost.add(prompt)
            (future,) = (f for f, asked in engine.flight.items() if asked.request.tokens[0] == prompt)
            del engine.flight[future]
            future.set_exception(EnginesLost("lost"))
        elif chance.random() < 0.7:
            engine.finish(prompt)

    def step(self, collector: AsyncRollouts, number: int) -> tuple[AsyncRollouts, Collected]:
        limit, memory = self.chance.choice([LIMIT, LIMIT, LIMIT, 8, 16]), self.chance.choice([None, None, None, Mu()])
        asked = order(
            number, self.wanted, select=dropping(self.dropped.__contains__), refill_rounds=3, max_tokens=limit
        )
        while True:
            try:
                return collector, collector.collect(self.source, order(number, **{**vars_of(asked), "memory": memory}))
            except SaveAsked:
                left = collector.unfinished()
                self.engine.abort([*self.engine.flight])
                collector = self.engine.rollouts(**self.settings)
                assert collector.take_up(Again(left), left) == 0


def vars_of(request: object) -> dict[str, object]:
    return {name: getattr(request, name) for name in ("wanted", "select", "refill_rounds", "max_tokens")}


class Again:
    """Hands the prompts of a save out again."""

    def __init__(self, left: Sequence) -> None:  # type: ignore[type-arg]
        self.left = left

    def take(self, count: int) -> list:  # type: ignore[type-arg]
        source, found = Prompts(), []
        for record in self.left[:count]:
            source.taken = record.position
            found += source.take(1)
        return found


@each_case("seed", range(12))
def test_over_any_schedule_each_prompt_trains_once_and_none_is_too_old(seed: int) -> None:
    world = World(seed)
    collector, seen = world.engine.rollouts(**world.settings), []
    for number in range(1, 11):
        collector, found = world.step(collector, number)
        assert found.metrics["rollout/stale_dropped"] == found.metrics["rollout/overdue"] == 0
        assert found.metrics.get("rollout/staleness_max", 0) <= world.staleness
        assert len(numbers(found)) == world.wanted
        for group in found.groups:
            for response in group.responses:
                completion = response.completion
                assert completion.tokens.tolist() == [token(completion.seed, i) for i in range(response.length)]
                assert completion.finish_reason is not FinishReason.ABORT
                assert versions_of(completion) == [-int(value) for value in completion.policy_logp]
        seen += numbers(found) + numbers(found, kept=False)
        world.engine.version += 1
    assert len(seen) == len(set(seen))
    assert sorted([*seen, *pending(collector)]) == list(range(world.source.taken))
