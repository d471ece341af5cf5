"""Sigma's damping and IAC by accuracy: closed forms, a count by hand, and claims on made-up figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megasharp.studies.bounds import accuracy, sharpening
from megasharp.studies.bounds.accuracy import ByAccuracy, accuracy_claims, accuracy_tables, by_accuracy, calibrated
from megasharp.studies.claims import Check
from megasharp.studies.study import Outcome

REFERENCE = np.array([0.1, 0.2, 0.3, 0.4])
CORRECT = np.array([True, True, False, False])
COUNT = np.array([0, 3, 1, 0])
BETA = np.asarray(0.5)


@pytest.fixture(scope="module")
def found() -> ByAccuracy:
    return by_accuracy(np.random.default_rng(0), 6000)


def outcomes(found: ByAccuracy) -> list[Outcome]:
    return [claim.outcome for claim in accuracy_claims(found)]


def test_iac_by_hand() -> None:
    """p = 3/4: the positive exponent .866 is divided by 4, the negative one stays; Z = .5 + .2 e^.217 + .3 e^-.866."""
    advantage_M = calibrated(sharpening.normalised_advantages(CORRECT, COUNT), CORRECT, np.asarray(0.75), 1.0)
    partition = 0.5 + 0.2 * np.exp(0.75**0.5 / 4) + 0.3 * np.exp(-(0.75**0.5))
    assert sharpening.batch_partition(REFERENCE, advantage_M, COUNT, BETA) == pytest.approx(partition)


def test_undamped_advantages_are_the_normalised_ones_over_sigma() -> None:
    normalised_M = sharpening.normalised_advantages(CORRECT, COUNT)
    undamped_M = accuracy.undamped_advantages(CORRECT, np.asarray(0.75))
    np.testing.assert_allclose(undamped_M, normalised_M / (3**0.5 / 4))
    np.testing.assert_allclose(undamped_M, [4 / 3, 4 / 3, -4.0, -4.0])


def test_bins_are_counted_one_by_one(found: ByAccuracy) -> None:
    """The same draws, each batch by itself through the theorem's functions."""
    rng = np.random.default_rng(0)
    cases = sharpening.random_cases(6000, rng)
    count_M = rng.multinomial(accuracy.GROUP, cases.reference_M)
    low, high, grown, lost = 0.25, 0.5, [], []
    for case in range(6000):
        reference_M, correct_M, beta = cases.reference_M[case], cases.correct_M[case], cases.beta[case]
        if not low < sharpening.batch_accuracy(correct_M, count_M[case]) <= high:
            continue
        advantage_M = sharpening.normalised_advantages(correct_M, count_M[case])
        policy_M = sharpening.batch_policy(reference_M, advantage_M, count_M[case], beta)
        grown.append(float(sharpening.batch_partition(reference_M, advantage_M, count_M[case], beta)))
        lost.append(sharpening.classify(policy_M, reference_M, correct_M) is sharpening.Sharpening.OVER)
    own = next(b for b in found.bins if b.low == low)
    assert own.batches == len(grown) > 500
    assert own.plain.suppressed == pytest.approx(np.mean(np.array(grown) > 1))
    assert own.plain.growth == pytest.approx(np.median(np.log(grown)))
    assert own.plain.over == pytest.approx(np.mean(lost))


def test_the_claims_can_fail(found: ByAccuracy) -> None:
    assert outcomes(found) == [Outcome.REPRODUCED] * 4
    assert sum(b.batches for b in found.bins) == len(found.spared[0]) == found.lowers.trials
    last = found.bins[-1]
    undone = replace(last, undamped=last.plain, plain=replace(last.plain, suppressed=0.1))
    raised = Check("sec 4.1", "", 10, 1, 0.1)
    broken = ByAccuracy((*found.bins[:-1], undone), raised, (-found.spared[0], -found.spared[1]))
    assert outcomes(broken) == [Outcome.DIFFERS] * 4


def test_tables_have_every_range(found: ByAccuracy) -> None:
    for table in accuracy_tables(found):
        assert len(table.rows) == len(accuracy.EDGES) - 1
        assert all(len(row) == len(table.columns) == len(set(table.columns)) for row in table.rows)
