"""False bold type, and power, of rules for differences between methods of several runs: which one `--compare` takes.

    python tools/simulate_intervals.py                     # 2,000 tables a setting: about four minutes on one core
    python tools/simulate_intervals.py --tables 40000      # more digits

Tables are simulated under the null: no method differs from another in its mean over runs and problems. A table has
`ROWS` methods compared with one baseline. `alone` is the share of single differences that a rule calls different at
5 %, `table` that of tables in which any row is bold, with Holm's correction where the rule has p-values.

Normal settings say how the variance of a difference is divided between runs, problems and their interaction, and the
ratio of the two methods' spread between runs. Binary settings draw the number of correct samples of each problem from
a success rate with the same three effects on the logit, and take pass@k of it. Power is of a true difference in units
of the difference's true standard deviation, alone at 5 % and at 0.5 %, the first of ten rows.

Rules that are compared: `old`, the interval over problems of differences between runs of one seed, and all seeds of one
sign (with a t interval where the table had BCa, the same for normal values); `seeds`, Welch's t over runs;
`Satterthwaite`, mean squares of the two-way analysis with Satterthwaite's degrees of freedom, none below zero;
`pigeonhole`, percentiles of means over resampled runs and problems (Owen 2007); `pairs` and `independent`, the two
forms of `megasharp.evals.crossed`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from megasharp.evals.crossed import Crossed, Values, bold, crossed, t_quantile

Bools = NDArray[np.bool_]
LEVEL = 0.95
ROWS = 10
RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class Normal:
    """Shares of a difference's variance by source; `ratio` of the spread between runs, baseline to method.

    With one run less on a side the shares are those of equal numbers.
    """

    runs: float
    problems: float
    interaction: float
    ratio: float = 1.0

    def __str__(self) -> str:
        shares = " / ".join(f"{100 * share:.0f}" for share in (self.runs, self.problems, self.interaction))
        return f"normal, {shares}" + (f", spread of runs {self.ratio:g} to 1" if self.ratio != 1.0 else "")

    def draw(self, rng: np.random.Generator, tables: int, runs: int, problems: int, *, baseline: bool) -> Values:
        """Return values [tables, runs, problems] of a method with mean 0."""
        spread = np.sqrt(self.ratio if baseline else 1.0 / self.ratio)
        run_R = np.sqrt(self.runs * runs / 2) * spread * rng.standard_normal((tables, runs, 1))
        problem_P = np.sqrt(self.problems * problems / 2) * rng.standard_normal((tables, 1, problems))
        rest_RP = np.sqrt(self.interaction * runs * problems / 2) * rng.standard_normal((tables, runs, problems))
        found: Values = run_R + problem_P + rest_RP
        return found


@dataclass(frozen=True, slots=True)
class Binary:
    """pass@k of `n` samples; standard deviations on the logit around `centre`, `shared` of problems for all methods."""

    centre: float
    shared: float
    runs: float
    problems: float
    interaction: float
    n: int
    k: int

    def __str__(self) -> str:
        return (
            f"pass@{self.k} of {self.n}, rates around {1 / (1 + np.exp(-self.centre)):.2f}, effects {self.runs:g} / "
            f"{self.problems:g} / {self.interaction:g}"
        )

    def draw(self, rng: np.random.Generator, tables: int, runs: int, problems: int, *, baseline: bool) -> Values:
        """Return values [tables, runs, problems] of a method; all methods of a table have its problems."""
        # The same problems for the baseline and for the methods: their own stream, which all of them begin anew.
        hard_P = np.random.default_rng(7).standard_normal((tables, 1, problems))
        logit_RP = (
            self.centre
            + self.shared * hard_P
            + self.runs * rng.standard_normal((tables, runs, 1))
            + self.problems * rng.standard_normal((tables, 1, problems))
            + self.interaction * rng.standard_normal((tables, runs, problems))
        )
        estimate_C = np.array([1.0 - comb(self.n - c, self.k) / comb(self.n, self.k) for c in range(self.n + 1)])
        found: Values = estimate_C[rng.binomial(self.n, 1.0 / (1.0 + np.exp(-logit_RP)))]
        return found


Setting = Normal | Binary
SETTINGS: tuple[Setting, ...] = (
    Normal(1.0, 0.0, 0.0),
    Normal(0.8, 0.2, 0.0),
    Normal(0.5, 0.25, 0.25),
    Normal(0.2, 0.4, 0.4),
    Normal(0.0, 1.0, 0.0),
    Normal(0.0, 0.0, 1.0),
    Normal(1.0, 0.0, 0.0, ratio=9.0),
    Normal(0.6, 0.2, 0.2, ratio=4.0),
    Binary(0.0, 1.5, 0.3, 0.5, 0.5, n=1, k=1),
    Binary(0.0, 1.5, 0.0, 1.5, 0.0, n=16, k=1),
    Binary(-3.0, 1.5, 0.5, 0.0, 0.5, n=16, k=8),
    Binary(-4.0, 1.0, 0.0, 0.0, 0.0, n=1, k=1),
    Binary(3.0, 2.0, 0.5, 0.5, 0.0, n=16, k=4),
)
# Runs of the baseline and of each method, and problems.
SIZES = ((2, 2, 30), (3, 3, 30), (3, 3, 256), (5, 5, 30), (2, 5, 30), (3, 8, 256))


def old(before_SRP: Values, after_SRP: Values) -> Bools:
    """Tell where the interval over problems and each pair of runs are on one side of zero; runs beyond are left out."""
    pairs = min(before_SRP.shape[1], after_SRP.shape[1])
    difference_SRP = after_SRP[:, :pairs] - before_SRP[:, :pairs]
    signs_S = np.abs(np.sign(difference_SRP.mean(axis=-1)).sum(axis=-1))
    return np.asarray(_excluded(difference_SRP.mean(axis=1)) & (signs_S == pairs))


def _excluded(value_SN: Values) -> Bools:
    """Tell where the t interval of the mean of the last axis excludes zero."""
    count = value_SN.shape[-1]
    half_S = t_quantile(np.asarray(1.0 - LEVEL), count - 1) * value_SN.std(axis=-1, ddof=1) / np.sqrt(count)
    return np.asarray(np.abs(value_SN.mean(axis=-1)) > half_S + 1e-12)


def seeds(before_SRP: Values, after_SRP: Values) -> Bools:
    """Welch's t of the runs' means."""
    found = _crossed(before_SRP, after_SRP, paired=False)
    return _satterthwaite(found.difference, found.runs, np.sum([estimate for estimate, _ in found.runs], axis=0))


def satterthwaite(before_SRP: Values, after_SRP: Values) -> Bools:
    """Sum the components of variance, none below zero; one t with Satterthwaite's degrees of freedom."""
    found = _crossed(before_SRP, after_SRP, paired=False)
    runs_S = np.sum([estimate for estimate, _ in found.runs], axis=0)
    total_S = found.residual + np.maximum(runs_S - found.residual, 0.0) + np.maximum(found.problems - found.residual, 0)
    return _satterthwaite(
        found.difference, [*found.runs, (found.problems, found.problem_count - 1)], np.asarray(total_S)
    )


def _satterthwaite(difference_S: Values, parts: Sequence[tuple[Values, int]], total_S: Values) -> Bools:
    total_S = np.maximum(total_S, 1e-30)
    freedom_S = total_S**2 / np.maximum(sum(part_S**2 / freedom for part_S, freedom in parts), 1e-60)
    # Rounded down, to the sum of all.
    whole_S = np.clip(freedom_S + 1e-9, 1, sum(freedom for _, freedom in parts)).astype(int)
    tail = np.asarray(1.0 - LEVEL)
    quantile_S = np.zeros(total_S.shape)
    for freedom in np.unique(whole_S):
        quantile_S[whole_S == freedom] = t_quantile(tail, int(freedom))
    return np.asarray(np.abs(difference_S) > quantile_S * np.sqrt(total_S) + 1e-12)


def pigeonhole(before_SRP: Values, after_SRP: Values) -> Bools:
    """Tell where percentiles of means over resampled runs and problems exclude zero; all tables are resampled alike."""
    rng = np.random.default_rng(11)
    problems = before_SRP.shape[-1]
    weight_PB = rng.multinomial(problems, np.full(problems, 1 / problems), RESAMPLES).T / problems
    means = []
    for value_SRP in (before_SRP, after_SRP):
        runs = value_SRP.shape[1]
        weight_RB = rng.multinomial(runs, np.full(runs, 1 / runs), RESAMPLES).T / runs
        means.append(np.einsum("srb,rb->sb", value_SRP @ weight_PB, weight_RB))
    low_S, high_S = np.quantile(means[1] - means[0], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
    return np.asarray((low_S > 1e-12) | (high_S < -1e-12))


def _crossed(before_SRP: Values, after_SRP: Values, *, paired: bool) -> Crossed:
    found = crossed(before_SRP, after_SRP, paired=paired)
    assert found is not None
    return found


def p_values(before_SRP: Values, method_MSRP: Sequence[Values], *, paired: bool) -> Values:
    """Return crossed p-values [tables, rows] of methods against the baseline."""
    found = [_crossed(before_SRP, after_SRP, paired=paired).p_value() for after_SRP in method_MSRP]
    return np.stack(found, axis=-1)


Rule = Callable[[Values, Values], Bools]
WITHOUT_CORRECTION: dict[str, Rule] = {
    "old": old,
    "seeds": seeds,
    "Satterthwaite": satterthwaite,
    "pigeonhole": pigeonhole,
}


def false_rates(
    setting: Setting,
    size: tuple[int, int, int],
    tables: int,
    rows: int = ROWS,
    beside: Sequence[str] = tuple(WITHOUT_CORRECTION),
) -> dict[str, Values]:
    """Return (alone, table) in 0..1 of the crossed forms and of the rules `beside`; pairs for equal numbers of runs."""
    rng = np.random.default_rng(size)
    first, second, problems = size
    before_SRP = setting.draw(rng, tables, first, problems, baseline=True)
    methods = [setting.draw(rng, tables, second, problems, baseline=False) for _ in range(rows)]
    found = {}
    for name in beside:
        marked_SM = np.stack([WITHOUT_CORRECTION[name](before_SRP, after_SRP) for after_SRP in methods], axis=-1)
        found[name] = np.array([marked_SM.mean(), marked_SM.any(axis=-1).mean()])
    for name, paired in (("pairs", True), ("independent", False)):
        if paired and first != second:
            continue
        p_SM = p_values(before_SRP, methods, paired=paired)
        found[name] = np.array([(p_SM <= 1 - LEVEL).mean(), bold(p_SM).any(axis=-1).mean()])
    return found


def power(size: tuple[int, int, int], effect: float, tail: float, tables: int) -> dict[str, float]:
    """Return the share of true differences of `effect` standard deviations that each form finds at `tail`."""
    setting = Normal(0.5, 0.25, 0.25)
    rng = np.random.default_rng(5)
    first, second, problems = size
    before_SRP = setting.draw(rng, tables, first, problems, baseline=True)
    after_SRP = setting.draw(rng, tables, second, problems, baseline=False) + effect
    found = {}
    for name, paired in (("pairs", True), ("independent", False)):
        if not paired or first == second:
            one = _crossed(before_SRP, after_SRP, paired=paired)
            found[name] = float((np.abs(one.difference) > one.half_width(1.0 - tail)).mean())
    return found


def _percent(values: Values) -> str:
    return " / ".join(f"{100 * value:.1f}" for value in values)


def lines(tables: int) -> Iterator[str]:
    """Yield the tables of docs/explanation/intervals.md: every setting of a size, the worst of each size, power."""
    names = (*WITHOUT_CORRECTION, "pairs", "independent")
    worst: dict[str, dict[str, Values]] = {}
    yield f"| runs, problems | setting | {' | '.join(names)} |"
    yield "|---" * (len(names) + 2) + "|"
    for size in SIZES:
        for setting in SETTINGS:
            found = false_rates(setting, size, tables)
            cells = [_percent(found[name]) if name in found else "" for name in names]
            yield f"| {_called(size)} | {setting} | {' | '.join(cells)} |"
            largest = worst.setdefault(_called(size), {})
            for name, rates in found.items():
                largest[name] = np.maximum(largest.get(name, 0.0), rates)
    yield ""
    yield f"| runs, problems | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for called, largest in worst.items():
        yield f"| {called} | {' | '.join(_percent(largest[name]) if name in largest else '' for name in names)} |"
    yield ""
    yield from _power_lines(tables)


def _called(size: tuple[int, int, int]) -> str:
    return f"{size[0]} and {size[1]}, {size[2]}"


def _power_lines(tables: int) -> Iterator[str]:
    effects = (2, 3, 5, 8, 16, 32)
    yield f"| runs | level | {' | '.join(f'{effect} SD' for effect in effects)} |"
    yield "|---" * (len(effects) + 2) + "|"
    for runs in (2, 3, 4, 5, 8):
        for tail in (0.05, 0.005):
            found = [power((runs, runs, 256), float(effect), tail, tables) for effect in effects]
            cells = [f"{100 * one['pairs']:.0f} / {100 * one['independent']:.0f}" for one in found]
            yield f"| {runs} | {100 * tail:g} % | {' | '.join(cells)} |"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=2000, help="simulated tables a setting")
    for line in lines(parser.parse_args().tables):
        print(line, flush=True)


if __name__ == "__main__":
    main()
