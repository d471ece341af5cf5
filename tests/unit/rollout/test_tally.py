"""A step's account of responses equals a count by hand: over a scripted engine, and over groups with every fate."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from megasharp.common.records import Completion, FinishReason, Group, Outcome, Prompt, Response, TaskAnswer, Verdict
from megasharp.rollout.step_request import Collected
from megasharp.rollout.tally import SURPLUS, Tally
from tests.unit.rollout.standin_engine import StandInEngine, completion, length
from tests.unit.rollout.test_async_collector import SAMPLING, Held, Prompts, dropping, numbers, order, rollouts


def figures(what: str, lengths: Sequence[int]) -> dict[str, float]:
    """The percentile is found by trying lengths: the least that nine of ten do not exceed."""
    row = {f"responses/{what}": len(lengths), f"responses/{what}_tokens": sum(lengths)}
    if lengths:
        row[f"responses/{what}_length_mean"] = sum(lengths) / len(lengths)
        enough = (n for n in sorted(lengths) if 10 * sum(other <= n for other in lengths) >= 9 * len(lengths))
        row[f"responses/{what}_length_p90"] = next(enough)
    return {name: float(value) for name, value in row.items()}


def response(seed: int, tokens: int, reason: FinishReason = FinishReason.STOP) -> Response:
    sampled = replace(completion(seed, 0, [0] * tokens, SAMPLING), finish_reason=reason)
    outcome = Outcome.INFRA if reason is FinishReason.ABORT else Outcome.WRONG
    return Response(sampled, "", Verdict(outcome, 0.0))


def group(*responses: Response, dropped: str | None = None) -> Group:
    return Group("g", Prompt("p", "echo", "", (1,), TaskAnswer(), "s", 0, 0), responses, 0, dropped)


def test_every_response_of_a_steps_groups_has_one_fate() -> None:
    groups = [
        group(response(1, 4), response(2, 7, FinishReason.ABORT), response(3, 0, FinishReason.ABORT), response(4, 9)),
        group(response(5, 5), response(6, 6), dropped="all_correct"),
        group(response(7, 1), response(8, 2), dropped=SURPLUS),
        group(response(9, 3), response(10, 8)),
    ]
    tally = Tally()
    tally.asked(range(1, 11))
    tally.answered(r.completion for each in groups for r in each.responses)
    # The flat order passes over dropped groups; place 3 is left out of the update, so are the two without a verdict.
    tally.grouped(groups, {0, 4, 5})
    assert tally.metrics() == {
        **figures("asked", [4, 7, 0, 9, 5, 6, 1, 2, 3, 8]),
        **figures("retried", []),
        **figures("finished", [4, 9, 5, 6, 1, 2, 3, 8]),
        **figures("discarded", [7, 0, 9, 1, 2]),
        **figures("dropped", [5, 6]),
        **figures("trained", [4, 3, 8]),
    }


def collected(found: Collected) -> dict[str, float]:
    """The step's row where the update reads everything that selection kept."""
    found.tally.grouped(found.groups, range(1000))
    return found.tally.metrics()


def lengths_of(seeds: Sequence[int]) -> list[int]:
    return [length(seed, SAMPLING.max_tokens) for seed in seeds]


def test_what_is_sent_again_between_two_steps_counts_in_the_second() -> None:
    """An evaluation's response that is sent again at that time counts in none."""
    gate = threading.Event()
    engine, source = StandInEngine(lambda prompt: 0.0 * (prompt < 2 or gate.wait())), Prompts()
    collector = rollouts(engine, oversample=1.0, max_staleness=1, stragglers="keep")
    collector.collect(source, order(1, wanted=2))
    kept = next(request.seeds[0] for request in engine.asked if request.tokens == (3,))
    again = [kept, kept, -1]
    engine.take_retried = lambda: [again.pop() for _ in range(len(again))]  # type: ignore[method-assign]
    engine.retried += 3
    gate.set()
    found = collector.collect(source, order(2, wanted=2, last=True))
    assert (found.metrics["rollout/retried"], collected(found)["responses/retried"]) == (2, 2)


def test_stragglers_are_asked_for_once_and_discarded_with_what_they_have() -> None:
    """Prompts 0 and 2 are aborted after two tokens; engines are lost once over prompt 1; prompt 3 is dropped."""
    engine, source = Held({0, 2}), Prompts()
    engine._lose = {1: 1}
    collector = rollouts(engine, oversample=0.5)
    found = collector.collect(source, order(1, select=dropping(lambda n: n == 3), wanted=3, refill_rounds=1))
    seeds = {request.tokens[0]: request.seeds for request in engine.asked}
    assert sorted(seeds) == [0, 1, 2, 3, 4, 5] and len(engine.asked) == 7
    held = [min(2, n) for n in lengths_of(seeds[0] + seeds[2])]
    done = lengths_of(seeds[1] + seeds[3] + seeds[4] + seeds[5])
    finished = [*done, *(n for n in lengths_of(seeds[0] + seeds[2]) if n <= 2)]
    assert collected(found) == {
        **figures("asked", [*done, *held]),
        **figures("retried", lengths_of(seeds[1])),
        **figures("finished", finished),
        **figures("discarded", held),
        **figures("dropped", lengths_of(seeds[3])),
        **figures("trained", lengths_of(seeds[1] + seeds[4] + seeds[5])),
    }
    engine.hold(set())
    engine._delay = lambda _: 0.0
    second = collector.collect(source, order(2, wanted=2))
    again = collected(second)
    seeds |= {request.tokens[0]: request.seeds for request in engine.asked[7:]}
    assert again["responses/asked"] == 3 * sum(prompt > 5 for prompt in seeds)
    trained = [n for prompt in numbers(second) for n in lengths_of(seeds[prompt])]
    assert {name: n for name, n in again.items() if "trained" in name} == figures("trained", trained)


def test_a_continued_response_is_asked_for_once_and_has_all_its_tokens() -> None:
    engine, source = Held({0, 2}), Prompts()
    collector = rollouts(engine, oversample=0.5, max_staleness=1)
    first = collected(collector.collect(source, order(1)))
    seeds = {request.tokens[0]: request.seeds for request in engine.asked}
    assert (first["responses/asked"], first["responses/discarded"], first["responses/trained"]) == (18, 0, 12)
    begun = [min(2, n) for n in lengths_of(seeds[0] + seeds[2])]
    assert first["responses/asked_tokens"] == first["responses/trained_tokens"] + sum(begun)
    engine.version = 1
    engine._delay = lambda _: 0.0
    found = collector.collect(source, order(2, wanted=2, last=True))
    second = collected(found)
    seeds |= {request.tokens[0]: request.seeds for request in engine.asked if request.tokens[0] > 5}
    assert second["responses/asked"] == 3 * sum(prompt > 5 for prompt in seeds)
    trained = [n for prompt in numbers(found) for n in lengths_of(seeds[prompt])]
    assert second["responses/trained_tokens"] == sum(trained)
    assert {0, 2} & set(numbers(found)) and found.metrics["rollout/continued"] == 2


def test_what_a_run_that_became_on_policy_may_not_train_on_is_discarded_when_it_is_thrown_away() -> None:
    engine, source = Held({0, 2}), Prompts()
    before = rollouts(engine, oversample=0.5, max_staleness=1)
    before.collect(source, order(1))
    collector = rollouts(engine)
    collector._backlog = before._backlog
    seeds = [seed for request in engine.asked if request.tokens[0] in (0, 2) for seed in request.seeds]
    engine.version = 2
    engine._delay = lambda _: 0.0
    found = collector.collect(source, order(2, wanted=2, last=True))
    row = collected(found)
    thrown = [min(2, n) for n in lengths_of(seeds)]
    assert {name: n for name, n in row.items() if "discarded" in name} == figures("discarded", thrown)
    assert found.metrics["rollout/stale_dropped"] == 2


def test_an_answer_before_its_own_end_has_not_finished() -> None:
    tally = Tally()
    part: Completion = response(5, 3, FinishReason.ABORT).completion
    tally.asked([5, 6])
    tally.answered([part])
    assert tally.metrics()["responses/finished"] == 0
    # The other one is still in flight: it has no length yet.
    assert {n: v for n, v in tally.metrics().items() if "asked" in n} == figures("asked", [3, 0])
