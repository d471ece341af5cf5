"""Simulate how often an interval of pass@k covers the truth, by resampled problems, as in `eval`, or samples too.

    python tools/simulate_coverage.py                   # the figures of docs/how-to/evaluate.md: seconds on one core

A suite's problems have success rates of Beta(0.3, 2), and n samples each; the truth is the mean of pass@k over that
distribution. With samples resampled too, each resampled problem's samples are drawn anew from its own, and the interval
holds the middle 95 % of the estimates.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from megasharp.evals.estimators import mean_intervals, pass_at_k

Floats = NDArray[np.float64]


def main() -> None:
    """Draw the suites and print both shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", type=int, default=400)
    parser.add_argument("--problems", type=int, default=256, help="of a suite")
    parser.add_argument("--n", type=int, default=8, help="samples of a problem")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--resamples", type=int, default=1000)
    given = parser.parse_args()
    generator = np.random.default_rng(0)
    estimate = np.array([pass_at_k(given.n, correct, given.k) for correct in range(given.n + 1)])
    truth = float(np.mean(1.0 - (1.0 - generator.beta(0.3, 2.0, size=2_000_000)) ** given.k))
    covered = {"problems": 0, "problems and samples": 0}
    for number in range(given.suites):
        counts = generator.binomial(given.n, generator.beta(0.3, 2.0, size=given.problems))
        (interval,) = mean_intervals(estimate[counts][:, None], seed=number, resamples=given.resamples)
        covered["problems"] += interval is not None and interval.low <= truth <= interval.high
        low, high = twice_resampled(generator, counts, estimate, given.resamples)
        covered["problems and samples"] += low <= truth <= high
    print(f"pass@{given.k}, truth {truth:.4f}; {given.suites} suites of {given.problems} problems, n = {given.n}")
    for what, often in covered.items():
        print(f"{what} resampled: covered in {100 * often / given.suites:.1f} %")


def twice_resampled(
    generator: np.random.Generator, counts: NDArray[np.int64], estimate: Floats, resamples: int
) -> tuple[float, float]:
    """Bounds that hold the middle 95 % of the means of resampled problems with resampled samples."""
    n = len(estimate) - 1
    drawn = generator.choice(counts, size=(resamples, len(counts)))
    means = estimate[generator.binomial(n, drawn / n)].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    main()
