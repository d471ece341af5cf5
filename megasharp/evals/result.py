"""The result of an evaluation: metrics of a suite with intervals, and a row per problem. `result_files.py` stores it.

A group of suites is one table: a row for each suite, and their unweighted average, as the papers' tables end in. A
suite that was measured several times (`repeats`) is one row: each problem's metrics are averaged over them first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megasharp.common.errors import UserError
from megasharp.common.files import write_text
from megasharp.common.formats import stamp
from megasharp.evals.estimators import Interval, Values, average_intervals, columns, mean_intervals, means
from megasharp.evals.samples import ProblemResult


@dataclass(frozen=True, slots=True)
class EvalSetting:
    """The setting of an evaluation: its suite, its model, the samples per problem and how they were drawn.

    `max_tokens` bounds a response; None in files that older versions wrote. `identity` names all else that must be the
    same for samples to be the same, such as digests of the weights and of the problems; empty where nobody asked.
    `max_turns` and `turn_tokens` are the limits of responses that environments answer; None of others.
    """

    suite: str
    label: str
    step: int | None
    n: int
    ks: tuple[int, ...]
    temperature: float
    seed: int
    top_p: float = 1.0
    max_tokens: int | None = None
    identity: Mapping[str, str] = field(default_factory=dict)
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    max_turns: int | None = None
    turn_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One model on one suite. All metrics are over the problems that were not left out.

    `avg_at_n` is the mean share of correct samples, `pass_at_n` the share of problems with a correct sample
    among all their samples: AVG@8 and PASS@8 of the papers where n is 8. `greedy_accuracy` is None where greedy was
    not asked for; `mean_length` counts the policy's tokens and `turns` the turns of a sample; `truncated` is a share of
    responses; `infra` counts samples; `seconds` is wall-clock time of all attempts, verification included. Fields after
    `rows` are empty or None where they were not measured (`estimators.columns` says what each is). `intervals` holds
    95% intervals by the metrics' names, such as `pass@4`.

    Example: `EvalResult(suite="countdown_dev", label="mine", step=0, n=64, temperature=1.0, seed=1,
    problems=128, left_out=0, pass_at_k={1: 0.13, 64: 0.88}, avg_at_n=0.13, pass_at_n=0.88,
    greedy_accuracy=0.2, ...)`.
    """

    suite: str
    label: str
    step: int | None
    n: int
    temperature: float
    seed: int
    problems: int
    left_out: int
    pass_at_k: Mapping[int, float]
    avg_at_n: float
    pass_at_n: float
    greedy_accuracy: float | None
    distinct_correct: float
    mean_length: float
    truncated: float
    infra: int
    tokens: int
    seconds: float
    rows: tuple[ProblemResult, ...]
    maj_at_k: Mapping[int, float] = field(default_factory=dict)
    answer_entropy: float | None = None
    token_entropy: float | None = None
    token_entropy_sampled: float | None = None
    lambdas: tuple[float, ...] = ()
    lambda_sample: float | None = None
    multiplicity: float | None = None
    solutions_found: float | None = None
    top_p: float = 1.0
    max_tokens: int | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    max_turns: int | None = None
    turn_tokens: int | None = None
    turns: float | None = None

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k, in order."""
        return tuple(sorted(self.pass_at_k))

    @property
    def kept(self) -> tuple[ProblemResult, ...]:
        """The rows that the metrics are over, as long as `rows` are known."""
        return kept_rows(self.rows, self.ks)

    def named(self) -> dict[str, float]:
        """Return metrics by their names within a suite, `pass@1` and so on; those not measured are left out."""
        values: dict[str, float | None] = {
            **{f"pass@{k}": value for k, value in self.pass_at_k.items()},
            **{f"maj@{k}": value for k, value in self.maj_at_k.items()},
            "avg@n": self.avg_at_n,
            "pass@n": self.pass_at_n,
            "distinct_correct": self.distinct_correct,
            "length_mean": self.mean_length,
            "turns": self.turns,
            "truncated": self.truncated,
            "infra": float(self.infra),
            "greedy": self.greedy_accuracy,
            "answer_entropy": self.answer_entropy,
            "token_entropy": self.token_entropy,
            "token_entropy_sampled": self.token_entropy_sampled,
            **{f"lambda_{n}": value for n, value in enumerate(self.lambdas, 1)},
            "lambda_sample": self.lambda_sample,
            "multiplicity": self.multiplicity,
            "solutions_found": self.solutions_found,
        }
        return {name: value for name, value in values.items() if value is not None}

    def figures(self) -> dict[str, float]:
        """Return metrics by their names in a run, `eval/<suite>/pass@1` and so on."""
        return {f"eval/{self.suite}/{name}": value for name, value in self.named().items()}


def kept_rows(rows: Sequence[ProblemResult], ks: Sequence[int]) -> tuple[ProblemResult, ...]:
    """Return the problems that have as many judged samples as the largest k asks for."""
    return tuple(row for row in rows if row.samples >= max(ks))


def summarize(rows: Sequence[ProblemResult], setting: EvalSetting, seconds: float) -> EvalResult:
    """Compute the metrics of `rows`; a problem with fewer than max(ks) judged samples is left out of all of them.

    Raises:
        UserError: no problem is left.
    """
    kept = kept_rows(rows, setting.ks)
    if not kept:
        raise UserError(
            f"suite {setting.suite}: infra failures left no problem with {max(setting.ks)} samples; "
            "mend what judges them, the machine or an environment, and repeat with another --out"
        )
    table = columns(kept, setting.ks, setting.seed)
    figures = means(table)
    bounds = mean_intervals(np.stack(list(table.values()), axis=1), seed=setting.seed)
    responses = sum(row.samples + row.infra for row in kept)
    ks = sorted(set(setting.ks))
    # In the order of their numbers, of which there are fewer than ten.
    lambdas = sorted(name for name in figures if name.startswith("lambda_") and name != "lambda_sample")
    return EvalResult(
        suite=setting.suite,
        label=setting.label,
        step=setting.step,
        n=setting.n,
        temperature=setting.temperature,
        seed=setting.seed,
        problems=len(kept),
        left_out=len(rows) - len(kept),
        pass_at_k={k: figures[f"pass@{k}"] for k in ks},
        avg_at_n=figures["avg@n"],
        pass_at_n=figures["pass@n"],
        greedy_accuracy=figures.get("greedy"),
        distinct_correct=figures["distinct_correct"],
        mean_length=sum(row.tokens for row in kept) / responses,
        truncated=sum(row.truncated for row in kept) / responses,
        infra=sum(row.infra for row in rows),
        tokens=sum(row.tokens for row in rows),
        seconds=seconds,
        rows=tuple(rows),
        maj_at_k={k: figures[f"maj@{k}"] for k in ks if f"maj@{k}" in figures},
        answer_entropy=figures.get("answer_entropy"),
        token_entropy=figures.get("token_entropy"),
        token_entropy_sampled=figures.get("token_entropy_sampled"),
        lambdas=tuple(figures[name] for name in lambdas),
        lambda_sample=figures.get("lambda_sample"),
        multiplicity=figures.get("multiplicity"),
        solutions_found=figures.get("solutions_found"),
        top_p=setting.top_p,
        max_tokens=setting.max_tokens,
        intervals={name: bound for name, bound in zip(table, bounds, strict=True) if bound is not None},
        identity=setting.identity,
        top_k=setting.top_k,
        min_p=setting.min_p,
        stop=setting.stop,
        max_turns=setting.max_turns,
        turn_tokens=setting.turn_tokens,
        turns=sum(turns) / responses if (turns := [row.turns for row in kept if row.turns]) else None,
    )


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Metrics by their names within a suite, and the intervals of those that have one."""

    problems: int
    figures: Mapping[str, float]
    intervals: Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A group's rows by the suites' names; `average` has the metrics that all of them have.

    `label` and `step` name the model, `source` is the paper's table, `ours` names settings that the paper does not
    give.
    """

    group: str
    label: str
    step: int | None
    source: str
    ours: tuple[str, ...]
    rows: Mapping[str, GroupRow]
    average: GroupRow


def averaged(
    group: str, source: str, ours: Sequence[str], members: Mapping[str, Sequence[EvalResult]], seed: int
) -> GroupResult:
    """Make a group's table of `members`: by the suites' names the results of each suite's repeats, rows included.

    Raises:
        UserError: infra failures left no problem that all repeats of a suite can score.
    """
    tables = {name: _table(name, results) for name, results in members.items()}
    rows = {name: _row([table], seed) for name, table in tables.items()}
    first = next(iter(members.values()))[0]
    average = _row(list(tables.values()), seed)
    return GroupResult(group, first.label, first.step, source, tuple(ours), rows, average)


def save_group(result: GroupResult, folder: Path) -> Path:
    """Write `folder`/<group>.json, intervals as [low, high]; return its path. Raises UserError where it cannot be."""
    path = folder / f"{result.group}.json"
    tree = {
        **stamp("evaluation"),
        "group": result.group,
        "label": result.label,
        "step": result.step,
        "source": result.source,
        "ours": list(result.ours),
        "suites": {name: _tree(row) for name, row in result.rows.items()},
        "average": _tree(result.average),
    }
    write_text(path, json.dumps(tree, indent=2, allow_nan=False) + "\n")
    return path


def _tree(row: GroupRow) -> dict[str, object]:
    bounds = {name: [bound.low, bound.high] for name, bound in row.intervals.items()}
    return {"problems": row.problems, "figures": dict(row.figures), "intervals": bounds}


def _table(name: str, results: Sequence[EvalResult]) -> dict[str, Values]:
    """Each problem's metrics, averaged over the repeats that a suite has; only problems that all of them can score."""
    shared = set.intersection(*({row.id for row in result.kept} for result in results))
    if not shared:
        raise UserError(f"suite {name}: infra failures left no problem that all {len(results)} repeats can score")
    found = [columns([row for row in result.kept if row.id in shared], result.ks, result.seed) for result in results]
    names = [figure for figure in found[0] if all(figure in table for table in found)]
    return {figure: np.mean([table[figure] for table in found], axis=0) for figure in names}


def _row(tables: Sequence[Mapping[str, Values]], seed: int) -> GroupRow:
    names = [name for name in tables[0] if all(name in table for table in tables)]
    each = [means(table) for table in tables]
    stacked = [np.stack([table[name] for name in names], axis=1) for table in tables]
    bounds = average_intervals(stacked, seed=seed)
    return GroupRow(
        problems=sum(len(table) for table in stacked),
        figures={name: sum(figures[name] for figures in each) / len(each) for name in names},
        intervals={name: bound for name, bound in zip(names, bounds, strict=True) if bound is not None},
    )
