"""Table 7 of 2511.19942: how many unique solutions a Countdown problem has, counted exactly.

The paper asks a language model for the solutions of 200 problems of TinyZero's set and counts 6.5 for three numbers and
15.7 for the whole set of three and four. That set is not here, and the text says no range. Problems are drawn as
we understand the set: numbers uniform from 1 to 99, a target uniform from 10 to 100, kept if it can be reached with
each number used once. The whole set's lengths are taken as even before that selection [ours], so that its mean weighs
three and four numbers by how often a target can be reached.

What "unique" means decides the count, so four meanings are counted. Each is a way to write an expression: two
expressions are the same solution if they are written alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from random import Random

import numpy as np

from megasharp.studies.claims import ERRORS, outcome, settle
from megasharp.studies.softmax import Floats
from megasharp.studies.study import Cell, Claim, Table
from megasharp.tasks.countdown import count_solutions

LARGEST_NUMBER, LEAST_TARGET, LARGEST_TARGET = 99, 10, 100
LENGTHS = (3, 4)
PROBLEMS = 100
# Table 7, of 200 problems each.
PAPER, PAPER_PROBLEMS = {"Countdown-3": 6.5, "Countdown": 15.7}, 200


@dataclass(frozen=True, slots=True)
class Written:
    """A text with its value; `rank` is 0 for a sum or difference, 1 for a product or quotient, 2 for a number."""

    text: str
    rank: int
    value: Fraction


Writer = Callable[[str, Written, Written], str]


def swapped(operator: str, left: Written, right: Written) -> str:
    """Write with all parentheses, the operands of + and * in order: a+b and b+a are alike, (a+b)+c and a+(b+c) not."""
    first, second = sorted((left.text, right.text)) if operator in "+*" else (left.text, right.text)
    return f"({first}{operator}{second})"


def minimal(operator: str, left: Written, right: Written) -> str:
    """Write with no more parentheses than needed: (a+b)+c and a+(b+c) are alike, a+b and b+a not."""
    first, second = left.text, right.text
    if operator in "*/":
        first = f"({first})" if left.rank == 0 else first
        second = f"({second})" if right.rank < (1 if operator == "*" else 2) else second
    elif operator == "-" and right.rank == 0:
        second = f"({second})"
    return f"{first}{operator}{second}"


def whole(operator: str, left: Written, right: Written) -> str:
    """Write with all parentheses as they are: any difference counts."""
    return f"({left.text}{operator}{right.text})"


WRITERS: dict[str, Writer] = {"but for swaps": swapped, "as written": minimal, "any difference": whole}
EXACT = "canonical"
MEANINGS = (EXACT, *WRITERS)


def count_written(numbers: tuple[int, ...], target: int, write: Writer) -> int:
    """Count the expressions that use each number once and are worth `target`, those written alike once."""
    whole_set = (1 << len(numbers)) - 1
    # By text, which for one writer fixes rank and value: fractions are slow to hash.
    found = {1 << place: {str(n): Written(str(n), 2, Fraction(n))} for place, n in enumerate(numbers)}
    for part in sorted(range(1, whole_set + 1), key=int.bit_count):
        if part in found:
            continue
        goal = Fraction(target) if part == whole_set else None
        found[part] = {
            written.text: written
            for chosen in range(1, part)
            if chosen & part == chosen
            for left in found[chosen].values()
            for right in found[part ^ chosen].values()
            for written in _combinations(left, right, write, goal)
        }
    return len(found[whole_set])


def _combinations(left: Written, right: Written, write: Writer, goal: Fraction | None) -> list[Written]:
    x, y = left.value, right.value
    values = [("+", 0, x + y), ("-", 0, x - y), ("*", 1, x * y)]
    if y:
        values.append(("/", 1, x / y))
    wanted = [each for each in values if goal is None or each[2] == goal]
    return [Written(write(operator, left, right), rank, value) for operator, rank, value in wanted]


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Problems of one length: the share of draws that can be solved, and by meaning the number of solutions of each."""

    solvable: float
    count_P: dict[str, Floats]


def draw_counts(length: int, rng: Random, problems: int) -> Counts:
    """Draw solvable problems of `length` numbers and count their solutions in every meaning."""
    counts: dict[str, list[int]] = {meaning: [] for meaning in MEANINGS}
    draws = 0
    while len(counts[EXACT]) < problems:
        draws += 1
        numbers = tuple(rng.randint(1, LARGEST_NUMBER) for _ in range(length))
        target = rng.randint(LEAST_TARGET, LARGEST_TARGET)
        if exact := count_solutions(numbers, target):
            counts[EXACT].append(exact)
            for meaning, write in WRITERS.items():
                counts[meaning].append(count_written(numbers, target, write))
    return Counts(problems / draws, {meaning: np.array(each, dtype=np.float64) for meaning, each in counts.items()})


def draw_all(seed: int) -> dict[int, Counts]:
    """Draw PROBLEMS of each length."""
    rng = Random(seed)
    return {length: draw_counts(length, rng, PROBLEMS) for length in LENGTHS}


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean number of solutions and its error, ours and that of the paper's sample together."""

    value: float
    error: float

    def fits(self, paper: float) -> bool:
        """Tell if the paper's number is within two errors."""
        return abs(self.value - paper) <= ERRORS * self.error


def means(found: dict[int, Counts], meaning: str) -> dict[str, Mean]:
    """Return the mean of each of Table 7's sets in one meaning of unique."""
    three, four = (found[length] for length in LENGTHS)
    weight = three.solvable / (three.solvable + four.solvable)
    (m3, v3), (m4, v4) = ((c.count_P[meaning].mean(), c.count_P[meaning].var(ddof=1)) for c in (three, four))
    mixed = weight * m3 + (1.0 - weight) * m4
    of_one = weight * v3 + (1.0 - weight) * v4 + weight * (1.0 - weight) * (m4 - m3) ** 2
    size = len(three.count_P[meaning])
    error = (weight**2 * v3 + (1.0 - weight) ** 2 * v4) / size + of_one / PAPER_PROBLEMS
    return {
        "Countdown-3": Mean(float(m3), float(np.sqrt(v3 / size + v3 / PAPER_PROBLEMS))),
        "Countdown": Mean(float(mixed), float(np.sqrt(error))),
    }


def tabulate(found: dict[int, Counts]) -> Table:
    """Make the table of means by meaning of unique."""
    rows: list[tuple[Cell, ...]] = []
    for meaning in MEANINGS:
        own = means(found, meaning)
        lengths = (float(found[length].count_P[meaning].mean()) for length in LENGTHS)
        rows.append((meaning, *lengths, *(cell for mean in own.values() for cell in (mean.value, mean.error))))
    columns = ("unique", "3 numbers", "4 numbers", *(name for set_name in PAPER for name in (set_name, "error")))
    shares = " and ".join(f"{found[length].solvable:.1%} of {length}" for length in LENGTHS)
    title = f"Table 7: mean number of unique solutions (solvable: {shares} numbers' draws)"
    return Table("multiplicity", title, columns, tuple(rows))


def judge(found: dict[int, Counts]) -> tuple[Claim, ...]:
    """Judge Table 7's two counts exactly and in any meaning, and their order."""
    paper = ", ".join(f"{value:g} ({name})" for name, value in PAPER.items())
    exact = means(found, EXACT)
    shown = ", ".join(f"{exact[name].value:.2f} +- {exact[name].error:.2f}" for name in PAPER)
    first = Claim(
        "Table 7",
        "mean number of unique solutions (order, nesting and signs of terms and factors set aside)",
        paper,
        f"{shown} (exact, numbers 1 to {LARGEST_NUMBER}, targets {LEAST_TARGET} to {LARGEST_TARGET})",
        outcome(_fitting(found, EXACT), len(PAPER)),
    )
    others = {meaning: means(found, meaning) for meaning in WRITERS}
    best = max(_fitting(found, meaning) for meaning in WRITERS)
    listed = "; ".join(
        f"{meaning} {', '.join(f'{own[name].value:.1f} +- {own[name].error:.1f}' for name in PAPER)}"
        for meaning, own in others.items()
    )
    second = Claim("Table 7", "the same in a wider meaning of unique", paper, listed, outcome(best, len(PAPER)))
    return first, second, _order(found)


def _fitting(found: dict[int, Counts], meaning: str) -> int:
    own = means(found, meaning)
    return sum(own[name].fits(value) for name, value in PAPER.items())


def _order(found: dict[int, Counts]) -> Claim:
    three, four = (found[length].count_P for length in LENGTHS)
    # The samples are independent, so any pairing gives the difference's error.
    verdict = settle([four[meaning] - three[meaning] for meaning in MEANINGS])
    listed = (f"{three[m].mean():.2f} and {four[m].mean():.2f} ({m})" for m in MEANINGS)
    alone = ", ".join(f"{(each[EXACT] == 1).mean():.0%}" for each in (three, four))
    ours = f"means {', '.join(listed)}; exactly one canonical solution: {alone}"
    return Claim("Table 7", "problems of four numbers have more solutions than of three", "more", ours, verdict)
