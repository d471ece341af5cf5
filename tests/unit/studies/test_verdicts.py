"""When a difference counts: closed forms, binomial tails, and how often pure noise passes."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from megasharp.studies.claims import clearly_above, clearly_below, clearly_rarer, outcome, settle, standard_error, weigh
from megasharp.studies.study import Outcome

SEEDS = 20


def spread_around(mean: float) -> np.ndarray:
    """Twenty values with that mean and a standard error of exactly 0.1."""
    value_R = np.arange(SEEDS) - (SEEDS - 1) / 2
    return np.asarray(mean + 0.1 * value_R / (value_R.std(ddof=1) / np.sqrt(SEEDS)))


def test_two_standard_errors_make_a_difference() -> None:
    assert standard_error(spread_around(3.0)) == pytest.approx(0.1)
    assert clearly_above(spread_around(0.21)) and not clearly_above(spread_around(0.19))
    assert clearly_below(spread_around(0.79), 1.0) and not clearly_below(spread_around(0.81), 1.0)
    assert not clearly_below(spread_around(0.21))


def test_one_seed_shows_nothing_and_equal_seeds_any_difference() -> None:
    assert not clearly_above(np.array([5.0])) and not clearly_below(np.array([-5.0]))
    assert clearly_above(np.full(3, 0.01)) and not clearly_above(np.zeros(3))


def test_noise_alone_is_rarely_clear() -> None:
    draw = np.random.default_rng(0).normal(size=(4000, SEEDS))
    # P(t_19 > 2) = .030; three of its standard errors over 4000 draws.
    assert np.mean([clearly_above(value_R) for value_R in draw]) == pytest.approx(0.030, abs=0.008)


def test_rarer_by_the_binomial_error_of_the_share_asked_for() -> None:
    def hits(count: int) -> np.ndarray:
        return np.arange(SEEDS) < count

    assert clearly_rarer(hits(17), 0.99) and not clearly_rarer(hits(17), 0.9)
    # Seeds that all miss have no spread, and still are rarer.
    assert clearly_rarer(hits(0), 0.5) and not clearly_rarer(hits(SEEDS), 0.95)
    flagged = [count for count in range(SEEDS + 1) if clearly_rarer(hits(count), 0.95)]
    chance = sum(comb(SEEDS, count) * 0.95**count * 0.05 ** (SEEDS - count) for count in flagged)
    assert max(flagged) == 17 and chance < 0.08


def test_outcomes_of_counts() -> None:
    assert [outcome(holds, 3) for holds in (0, 1, 3)] == [Outcome.DIFFERS, Outcome.PARTLY, Outcome.REPRODUCED]
    weighed = [weigh(favour, against, 4) for favour, against in ((3, 0), (3, 1), (2, 0), (0, 3))]
    assert weighed == [Outcome.REPRODUCED, Outcome.PARTLY, Outcome.PARTLY, Outcome.DIFFERS]


@pytest.mark.parametrize(
    ("means", "verdict"),
    [
        ((0.5, 0.1, 0.0), Outcome.REPRODUCED),
        ((0.9, 0.5, -0.3), Outcome.PARTLY),
        ((0.1, 0.1, 0.1), Outcome.PARTLY),
        ((-0.5, 0.1, -0.4), Outcome.DIFFERS),
        ((-0.9, -0.5, 0.3), Outcome.PARTLY),
    ],
)
def test_settling_asks_for_a_clear_mean_and_no_clear_opposite(means: tuple[float, ...], verdict: Outcome) -> None:
    assert settle([spread_around(mean) for mean in means]) is verdict
