"""The health of one engine: every state under every event."""

from __future__ import annotations

from itertools import product

from cases import each_case

from megasharp.rollout.sglang.client.health import (
    Answered,
    Condition,
    Doubted,
    Event,
    Health,
    Lost,
    Missed,
    Wanted,
    after,
)

STARTING, SERVING, SUSPECT, STALE, DEAD = (
    Condition.STARTING,
    Condition.SERVING,
    Condition.SUSPECT,
    Condition.STALE,
    Condition.DEAD,
)
# For each state, where each event leads, with version 5 wanted and three misses allowed, one of them already used by a
# suspect engine.
TABLE = {
    STARTING: {
        "same": SERVING,
        "other": STALE,
        "missed": STARTING,
        "doubted": STARTING,
        "lost": DEAD,
        "wanted": STARTING,
    },
    SERVING: {"same": SERVING, "other": STALE, "missed": SUSPECT, "doubted": SUSPECT, "lost": DEAD, "wanted": STALE},
    SUSPECT: {"same": SERVING, "other": STALE, "missed": SUSPECT, "doubted": SUSPECT, "lost": DEAD, "wanted": STALE},
    STALE: {"same": SERVING, "other": STALE, "missed": STALE, "doubted": STALE, "lost": DEAD, "wanted": STALE},
    DEAD: {"same": DEAD, "other": DEAD, "missed": DEAD, "doubted": DEAD, "lost": DEAD, "wanted": DEAD},
}
EVENTS: dict[str, Event] = {
    "same": Answered(5),
    "other": Answered(4),
    "missed": Missed("no answer"),
    "doubted": Doubted("a request failed"),
    "lost": Lost("exit code -9"),
    "wanted": Wanted(6),
}


@each_case(("start", "name"), list(product(Condition, EVENTS)))
def test_every_state_under_every_event(start: Condition, name: str) -> None:
    health = Health(start, wanted=5, missed=1 if start is SUSPECT else 0)
    assert after(health, EVENTS[name], dead_after=3).condition is TABLE[start][name]


@each_case("start", [SERVING, SUSPECT, STALE])
@each_case("limit", [1, 2, 5])
def test_so_many_misses_in_a_row_kill(start: Condition, limit: int) -> None:
    health = Health(start, wanted=5)
    for number in range(limit):
        assert health.alive, number
        health = after(health, Missed(f"miss {number}"), limit)
    assert health.condition is DEAD
    assert health.reason == f"miss {limit - 1}"


def test_failed_requests_alone_never_kill() -> None:
    health = Health(SERVING, wanted=5)
    for _ in range(100):
        health = after(health, Doubted("hung up"), 3)
    assert health == Health(SUSPECT, wanted=5, reason="hung up")
    assert after(health, Answered(5), 3).serving


def test_an_answer_forgets_misses() -> None:
    health = Health(SERVING, wanted=5)
    for _ in range(10):
        health = after(after(health, Missed("slow"), 3), Missed("slow"), 3)
        assert health.condition is SUSPECT
        health = after(health, Answered(5), 3)
        assert health == Health(SERVING, wanted=5)


def test_stale_until_it_answers_with_what_is_wanted() -> None:
    health = after(Health(SERVING, wanted=5), Wanted(6), 3)
    assert after(health, Answered(5), 3).condition is STALE
    assert after(health, Answered(7), 3).condition is STALE
    assert after(health, Answered(6), 3).serving


def test_weights_pushed_again_under_their_version_are_stale_too() -> None:
    """Half of them may have been replaced when the push failed."""
    assert after(Health(SERVING, wanted=5), Wanted(5), 3).condition is STALE


def test_dead_is_for_good_and_keeps_its_first_reason() -> None:
    dead = after(Health(SERVING, wanted=5), Lost("exit code -9"), 3)
    for event in EVENTS.values():
        dead = after(dead, event, 3)
    assert dead == Health(DEAD, wanted=5, reason="exit code -9")


def test_only_serving_gets_requests() -> None:
    assert [condition for condition in Condition if Health(condition).serving] == [SERVING]
    assert [condition for condition in Condition if not Health(condition).alive] == [DEAD]
