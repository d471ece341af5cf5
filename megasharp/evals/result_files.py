"""An evaluation's files, `<suite>.parquet` with a row per problem and `<suite>.json` with the rest, and its text.

The table's columns are the fields of `samples.ProblemResult`, those of its records spread out: `answer_counts` and
`answer_correct` have an entry per distinct answer, the most frequent first, `answer_texts` for the first 64 of them;
`invalid` and `unnamed` are `Answers`'; `token_entropy`, `token_entropy_sampled`, `lambdas` and `lambda_sample` are
`TokenFigures`'. In the JSON file `intervals` has [low, high] by the metrics' names. As text, a result is a line for
each metric with its 95% interval.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasharp.common.errors import UserError, one_line, reason_at
from megasharp.common.files import completed
from megasharp.common.formats import read_stamp, stamp
from megasharp.evals.estimators import Interval
from megasharp.evals.groups import LATER
from megasharp.evals.result import EvalResult, GroupResult
from megasharp.evals.samples import Answers, ProblemResult, TokenFigures
from megasharp.metrics.parquet import arrow, parquet, write_rows

if TYPE_CHECKING:
    import pyarrow as pa

_COUNTS = (
    *("samples", "correct", "distinct_correct", "wrong", "format", "error", "timeout", "infra", "tokens", "truncated"),
    *("solutions", "solutions_found", "turns"),
)


@cache
def _schema() -> pa.Schema:
    """A row for each problem."""
    pa = arrow()
    return pa.schema(
        [
            pa.field("id", pa.string()),
            *(pa.field(name, pa.int64()) for name in _COUNTS),
            pa.field("greedy_correct", pa.bool_()),
            pa.field("answer_counts", pa.list_(pa.int64())),
            pa.field("answer_correct", pa.list_(pa.bool_())),
            pa.field("answer_texts", pa.list_(pa.string())),
            pa.field("invalid", pa.int64()),
            pa.field("unnamed", pa.int64()),
            pa.field("answer_entropy", pa.float64()),
            pa.field("token_entropy", pa.float64()),
            pa.field("token_entropy_sampled", pa.float64()),
            pa.field("lambdas", pa.list_(pa.float64())),
            pa.field("lambda_sample", pa.float64()),
        ]
    )


def save(result: EvalResult, folder: Path) -> Path:
    """Write `folder`/<suite>.parquet, then <suite>.json; return its path.

    Raises:
        UserError: a file cannot be written.
    """
    with completed(folder / f"{result.suite}.parquet") as temporary:
        write_rows([_record(row) for row in result.rows], _schema(), temporary)
    figures = {field.name: getattr(result, field.name) for field in fields(result) if field.name != "rows"}
    # Only where they say something: releases before them read all other results.
    newer = (*LATER, "max_turns", "turn_tokens", "turns")
    figures = {name: value for name, value in figures.items() if name not in newer or value}
    figures = {**stamp("evaluation"), **figures}
    figures["intervals"] = {name: [bound.low, bound.high] for name, bound in result.intervals.items()}
    path = folder / f"{result.suite}.json"
    with completed(path) as temporary:
        temporary.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def load_result(path: Path) -> EvalResult:
    """Read the result that `save` wrote as `path`, rows included; also those of older versions, which measured less.

    Raises:
        UserError: the file, or the table beside it, is missing or is no evaluation's.
    """
    result = load_figures(path)
    table = path.with_suffix(".parquet")
    try:
        records = parquet().read_table(table).to_pylist()
        rows = tuple(_row(record) for record in records)
    except (OSError, arrow().ArrowException, KeyError, TypeError) as error:
        raise UserError(
            f"{table}: not the table of an evaluation beside {path.name} ({reason_at(error, table)})"
        ) from error
    whole = len(rows) == result.problems + result.left_out
    if not whole or any(row.samples + row.infra != result.n for row in rows):
        raise UserError(
            f"{table}: {len(rows)} problems that are not the {result.problems + result.left_out} of {result.n} samples "
            f"each which {path.name} is of; put back the table that was written with it"
        )
    return replace(result, rows=rows)


def load_figures(path: Path) -> EvalResult:
    """Read the result that `save` wrote as `path`, without its rows. Raises UserError as `load_result` does."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        read_stamp(path, "evaluation", tree)
        if "group" in tree:
            suites = ", ".join(f"{name}.json" for name in tree["suites"])
            raise UserError(f"{path} is the table of a group; give the file of one of its suites: {suites}")
        for name in ("format", "megasharp"):
            tree.pop(name, None)
        # Format 1 (a2725ee, 2026-11-21, to 255d13e, 2026-11-24) has no `format`; what came after its first files, from
        # `maj_at_k` (1ee861e) to `identity` (ddee362, both 2026-11-22), may be missing.
        for name in ("pass_at_k", "maj_at_k"):
            tree[name] = {int(k): value for k, value in tree.get(name, {}).items()}
        tree["intervals"] = {name: Interval(*bounds) for name, bounds in tree.get("intervals", {}).items()}
        # `top_k`, `min_p` and `stop` were off before they were there.
        for name in ("lambdas", "stop"):
            tree[name] = tuple(tree.get(name, ()))
        # Up to e9015b9 (2026-11-26) it had the size of chunks, on which no figure depends.
        tree.get("identity", {}).pop("chunk", None)
        return EvalResult(**tree, rows=())
    except OSError as error:
        raise UserError(f"{path}: cannot read this evaluation ({reason_at(error, path)})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not the JSON file of an evaluation ({one_line(error)})") from error


def suites_of_group(path: Path) -> list[str]:
    """Return the suites of the group whose table `path` is; none for another file."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return list(tree["suites"]) if "group" in tree else []
    except (OSError, ValueError, TypeError, KeyError):
        return []


def stored_figures(path: Path) -> dict[str, float]:
    """Read the metrics of a result that `save` wrote as `path`, bit for bit those of the result itself."""
    return load_figures(path).figures()


def _record(row: ProblemResult) -> dict[str, Any]:
    answers, seen = row.answers, row.tokens_seen
    record = {name: getattr(row, name) for name in ("id", *_COUNTS, "greedy_correct")}
    record |= {"token_entropy": seen.entropy, "token_entropy_sampled": seen.entropy_sampled}
    record |= {"lambdas": list(seen.lambdas), "lambda_sample": seen.lambda_sample}
    if answers is not None:
        spread = asdict(answers)
        record |= {f"answer_{name}": list(spread[name]) for name in ("counts", "correct", "texts")}
        record |= {"invalid": answers.invalid, "unnamed": answers.unnamed, "answer_entropy": answers.entropy}
    return record


def _row(record: Mapping[str, Any]) -> ProblemResult:
    plain: dict[str, Any] = {name: record.get(name) for name in ("id", *_COUNTS, "greedy_correct")}
    answers = None
    if record.get("answer_counts") is not None:
        lists = {name: tuple(record[f"answer_{name}"]) for name in ("counts", "correct", "texts")}
        answers = Answers(**lists, invalid=record["invalid"], unnamed=record["unnamed"])
    seen = TokenFigures(
        entropy=record.get("token_entropy"),
        entropy_sampled=record.get("token_entropy_sampled"),
        lambdas=tuple(record.get("lambdas") or ()),
        lambda_sample=record.get("lambda_sample"),
    )
    return ProblemResult(**plain, answers=answers, tokens_seen=seen)


# Simulated suites (success rates from a beta distribution, pass@1): intervals of 95% covered the truth in 77% of suites
# of 5 problems, 86% of 10, 93% of 20, 94% of 50.
_MANY = 20


def result_lines(result: EvalResult) -> Iterator[str]:
    """Yield a heading, then a line for each metric."""
    # Few set these.
    cuts = (("top-k", result.top_k), ("min-p", result.min_p), ("stop", [*result.stop]))
    named = "".join(f", {name} {value}" for name, value in cuts if value)
    turns = "" if result.max_turns is None else f", the environment's included, and {result.max_turns} turns"
    turns += "" if result.turn_tokens is None else f" of at most {result.turn_tokens}"
    yield (
        f"{result.suite} of {result.label}: {result.problems} problems x {result.n} samples, temperature "
        f"{result.temperature:g}, top-p {result.top_p:g}{named}, at most {result.max_tokens} tokens{turns}"
    )
    if result.left_out:
        yield f"  left out for infra failures: {result.left_out} problems"
    if result.problems < _MANY:
        yield f"  {result.problems} problems are few: the intervals are too narrow (of 10 they cover 86%, not 95%)"
    yield from (f"  {line}" for line in _figures(result.named(), result.intervals))


def group_lines(table: GroupResult) -> Iterator[str]:
    """Yield a line per suite and one for the average: pass@1 and the largest k that all suites have."""
    ks = [int(name.removeprefix("pass@")) for name in table.average.figures if name.removeprefix("pass@").isdigit()]
    names = ["pass@1", f"pass@{max(ks)}"] if len(ks) > 1 else [f"pass@{k}" for k in ks]
    width = max(map(len, (*table.rows, "average")))
    yield f"{table.group} of {table.label} ({table.source})"
    for name, row in (*table.rows.items(), ("average", table.average)):
        values = {each: f"{value:.4f}{_interval(row.intervals.get(each))}" for each, value in row.figures.items()}
        yield f"  {name:<{width}}  " + "  ".join(f"{each} {values.get(each, '-')}" for each in names)


def _figures(figures: Mapping[str, float], intervals: Mapping[str, Interval]) -> Iterator[str]:
    width = max(map(len, figures))
    for name, value in figures.items():
        yield f"{name:<{width}}  {value:.4f}{_interval(intervals.get(name))}"


def _interval(bound: Interval | None) -> str:
    return "" if bound is None else f" [{bound.low:.4f}, {bound.high:.4f}]"
