"""Fuzzing of the mathematics verifier: pairs of generated LaTeX, and numbers in many spellings with a known value.

What no other test shows: no input raises, whatever sympy thinks of it; a text is itself; two spellings are the same
exactly where their values are. `latex_grammar.py` says what it cannot reach.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from random import Random

import pytest
from latex_grammar import pair, spelling
from sympy.core.cache import clear_cache

from megasharp.common.records import Outcome
from megasharp.tasks.extraction import last_box
from megasharp.tasks.math import MathAnswer, verify

# A worker of the pool is killed after so long (`reward.timeout_s`); of CPU time here.
LIMIT_S = 10.0


class _Slow(BaseException):
    """The limit of CPU time; no Exception, which the library would swallow."""


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _Slow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _judged(gold: str, given: str) -> Outcome | None:
    """The outcome for a box; None for one beyond the limit, which the pool would kill."""
    try:
        with _limited():
            return verify(rf"\boxed{{{given}}}", MathAnswer(gold)).outcome
    except _Slow:
        return None


def _fuzz(seed: int, pairs: int) -> list[tuple[str, str]]:
    """Judge so many pairs; the slow ones are returned, those that raise fail with the pair."""
    random, slow = Random(seed), []
    for _ in range(pairs):
        gold, given = pair(random)
        try:
            outcome = _judged(gold, given)
        except Exception as error:
            raise AssertionError(f"{gold!r} against {given!r} raises {type(error).__name__}") from error
        if outcome is None:
            slow.append((gold, given))
        # A brace too many ends the box before its answer does.
        elif gold == given and last_box(rf"\boxed{{{gold}}}") == gold.strip():
            assert outcome in (Outcome.CORRECT, Outcome.FORMAT), gold
    clear_cache()
    return slow


def _values(random: Random) -> tuple[Fraction, Fraction]:
    one = Fraction(random.randrange(-60, 60), random.choice((1, 1, 2, 3, 4, 7, 20)))
    return one, one if random.random() < 0.5 else one + random.choice((1, -1, Fraction(1, 7), -2 * one))


def test_generated_pairs_never_raise() -> None:
    assert not _fuzz(seed=27, pairs=40)


def test_spellings_are_equal_where_their_values_are() -> None:
    random = Random(27)
    for _ in range(80):
        one, other = _values(random)
        gold, given = spelling(random, one), spelling(random, other)
        # The known answer of a data set has no relation or words that lead to it.
        gold = gold if not set("=≡").intersection(gold) and "answer" not in gold and "pmod" not in gold else str(one)
        expected = Outcome.CORRECT if one == other else Outcome.WRONG
        assert _judged(gold, given) is expected, (gold, given)


# 20,000 pairs in all.
@pytest.mark.long("verifiers")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_many_generated_pairs_never_raise(seed: int) -> None:
    slow = _fuzz(seed, pairs=2000)
    # Solving equations on both sides has no bound but the pool's.
    assert len(slow) <= 4, slow
