"""By how much the best of many evaluations flatters a method: the peaks of 2601.15609, Table 2 (section 5.1).

    python tools/expected_peaks.py                  # a second

The paper trains for 2,000 steps, evaluates every 50 and reports each method's peak. If a method's true accuracy is
constant over n of these 40 evaluations, the peak is above it by what the largest of n noisy means is above its mean:
2.16 standard deviations of one evaluation for 40, 1.54 for 10. An accuracy that still rises has less of it.

The noise follows from the paper's own cells. A set's problems have success rates p from a Beta distribution, whose two
parameters are solved for the printed AVG@8 = E p and PASS@8 = 1 - E (1 - p)^8. With P problems and 8 samples

    variance of AVG@8 = E p (1 - p) / (8 P),     variance of PASS@8 = (E (1 - p)^8 - E (1 - p)^16) / P

Only the samples' noise counts: all checkpoints meet the same problems. Peaks of equal methods are equal in the mean, so
comparing them is fair as far as their noise is the same; a method whose rates are nearer to 1/2 has more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import erf, exp, lgamma, pi, sqrt

import numpy as np

SAMPLES = 8
EVALUATIONS = 40
PLATEAUS = (10, 20, 40)
PROBLEMS: Mapping[str, int] = {
    "GSM8K": 1319,
    "MATH-500": 500,
    "LightEval": 5000,
    "AIME24": 30,
    "Minerva": 272,
    "O-Bench": 674,
}
# Table 2 of 2601.15609, Qwen3-8B, in %: AVG@8 and PASS@8 in the order of PROBLEMS.
TABLE_2: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "GRPO": ((95.59, 85.81, 71.12, 35.42, 47.20, 49.79), (96.51, 91.39, 75.19, 52.36, 55.65, 56.88)),
    "IAC": ((95.72, 87.67, 73.85, 35.42, 50.60, 50.49), (97.56, 94.54, 78.69, 52.67, 60.60, 58.48)),
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Success rates of a set's problems: Beta(a, b)."""

    a: float
    b: float

    def failing(self, samples: int) -> float:
        """E (1 - p)^samples."""
        a, b = self.a, self.b
        return exp(lgamma(b + samples) + lgamma(a + b) - lgamma(b) - lgamma(a + b + samples))


def fit(mean: float, solved: float, samples: int = SAMPLES) -> Rates:
    """Return the Beta distribution with E p = mean and 1 - E (1 - p)^samples = solved.

    Raises ValueError where none has both: `solved` is between `mean` and 1 - (1 - mean)^samples.
    """
    if not mean < solved < 1.0 - (1.0 - mean) ** samples:
        raise ValueError(f"no distribution has AVG {mean} and PASS {solved} at {samples} samples")
    low, high = -12.0, 12.0
    for _ in range(200):
        middle = (low + high) / 2.0
        rates = Rates(mean * exp(middle), (1.0 - mean) * exp(middle))
        # The more alike the problems are, the more of them are solved by one of several samples.
        low, high = (middle, high) if 1.0 - rates.failing(samples) < solved else (low, middle)
    return rates


def average_deviation(rates: Rates, problems: int, samples: int = SAMPLES) -> float:
    """Return the standard deviation of AVG@samples from the samples alone."""
    return sqrt((rates.failing(1) - rates.failing(2)) / (samples * problems))


def solved_deviation(rates: Rates, problems: int, samples: int = SAMPLES) -> float:
    """Return the standard deviation of PASS@samples from the samples alone."""
    return sqrt((rates.failing(samples) - rates.failing(2 * samples)) / problems)


def largest_normal(count: int) -> float:
    """Return the expected largest of `count` standard normal numbers, by integration."""
    z = np.linspace(-10.0, 10.0, 20_001)
    below = np.array([(1.0 + erf(x / sqrt(2.0))) / 2.0 for x in z])
    density = count * np.exp(-(z**2) / 2.0) / sqrt(2.0 * pi) * below ** (count - 1)
    return float((z * density).sum() * (z[1] - z[0]))


@dataclass(frozen=True, slots=True)
class Row:
    """A set and a metric, in points: the printed gain of IAC over GRPO, and the deviations of one evaluation."""

    name: str
    gain: float
    grpo: float
    iac: float

    def flattery(self, plateau: int = EVALUATIONS) -> float:
        """By how much GRPO's peak of `plateau` evaluations is above its true value, expected."""
        return largest_normal(plateau) * self.grpo

    @property
    def unfairness(self) -> float:
        """By how much more IAC's peak of EVALUATIONS is raised than GRPO's."""
        return largest_normal(EVALUATIONS) * (self.iac - self.grpo)


def rows() -> Iterator[Row]:
    """Yield both metrics of every set, then the averages over the sets, of which one checkpoint is the peak."""
    spread = {
        method: [
            (average_deviation(rates, count), solved_deviation(rates, count))
            for rates, count in zip(
                (fit(m / 100, s / 100) for m, s in zip(*cells, strict=True)), PROBLEMS.values(), strict=True
            )
        ]
        for method, cells in TABLE_2.items()
    }
    for metric, title in enumerate(("AVG@8", "PASS@8")):
        gains = [iac - grpo for iac, grpo in zip(TABLE_2["IAC"][metric], TABLE_2["GRPO"][metric], strict=True)]
        each = {method: np.array([100 * pair[metric] for pair in pairs]) for method, pairs in spread.items()}
        for place, name in enumerate(PROBLEMS):
            yield Row(f"{title} {name}", gains[place], each["GRPO"][place], each["IAC"][place])
        mean = {method: float(np.sqrt((x**2).sum()) / len(x)) for method, x in each.items()}
        yield Row(f"{title} average", float(np.mean(gains)), mean["GRPO"], mean["IAC"])


def main() -> None:
    """Print the table of docs/explanation/intervals.md."""
    heads = [f"peak of {plateau}" for plateau in PLATEAUS]
    print("| set | IAC less GRPO | SD of one | " + " | ".join(heads) + f" | IAC's peak of {EVALUATIONS} less GRPO's |")
    print("|---" * (4 + len(PLATEAUS)) + "|")
    for row in rows():
        peaks = " | ".join(f"+{row.flattery(plateau):.2f}" for plateau in PLATEAUS)
        print(f"| {row.name} | {row.gain:+.2f} | {row.grpo:.2f} | {peaks} | {row.unfairness:+.2f} |")


if __name__ == "__main__":
    main()
