"""The responses of training on the page: some of them as text, and counts over many of them.

Counted are groups by their share of correct responses, and correct responses that contain failed code: the case study
of 2510.04028 (section 4.2 and appendix C.6). There, models that solve mathematics write Python and continue with what
it would print; responses with a correct answer contain errors such as
`TypeError: cannot determine truth value of Relational`, and GRPO reinforces all of their tokens. The paper shows such
responses and gives no rule. Ours: a response reports an error where a line of it begins a Python traceback, or names an
exception and then a colon and its message, as Python prints it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megasharp.common.records import Outcome
from megasharp.metrics.response_table import prompt_rank, read_table, read_tokens, table_step
from megasharp.reporting.history import RunHistory, kept_responses
from megasharp.reporting.page.float_arrays import packed
from megasharp.reporting.page.records import (
    Bars,
    CodeErrors,
    RolloutRow,
    Rollouts,
    Series,
    Success,
    ranges,
    rounded,
    share_bin,
    shared_steps,
    spread_out,
)

_PATTERN = re.compile(
    r"^[ \t>]*(?P<trace>Traceback \(most recent call last\):)"
    r"|^[ \t>]*(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Iteration|Warning)): \S",
    re.MULTILINE,
)
_WARNING = "Warning"


def code_error(text: str) -> str | None:
    """Return the first error that `text` reports, such as `TypeError`, or None. Warnings are no errors."""
    trace = False
    for match in _PATTERN.finditer(text):
        if match["name"] is None:
            trace = True
        elif not match["name"].endswith(_WARNING):
            return match["name"]
    return "Traceback" if trace else None


# On the page: steps of each run, prompts of each step, responses of a prompt, and the letters of all of them.
SHOWN_STEPS, SHOWN_PROMPTS, SHOWN_RESPONSES = 12, 6, 8
MOST_LETTERS, LONGEST_TEXT = 3_000_000, 6_000
# Counted: tables of each run, and responses of each table.
COUNTED_STEPS, COUNTED_RESPONSES = 100, 4096
_LABELS = ["0", "to 1/4", "to 1/2", "to 3/4", "below 1", "1"]
# Parts of a share between none and all, and parts of the training.
_QUARTERS, _PARTS = 4, 3
_COUNTED = ("group_id", "outcome", "text", "turn_places")
_SHOWN = ("prompt_id", "group_id", "index", "outcome", "reward", "canonical_answer", "text", "length", "dropped_reason")
# Columns that older tables lack.
_NEWER = ("prompt", "turn_places")


@dataclass(frozen=True, slots=True)
class Responses:
    """Training's responses as the page has them."""

    shown: Rollouts
    success: Success | None
    code_errors: CodeErrors


@dataclass(frozen=True, slots=True)
class _Table:
    """A step's table as it is now; a served page reads each once."""

    step: int
    path: Path
    modified: int
    size: int


@dataclass(frozen=True, slots=True)
class _Counted:
    """Counts of one step: (correct, scored) responses of each group, and errors in correct responses."""

    step: int
    solved: tuple[tuple[int, int], ...]
    responses: int
    correct: int
    errors: int


def read_rollouts(runs: Sequence[RunHistory]) -> Responses:
    """Read the tables of the runs. Raises UserError for a damaged one."""
    tables = [_tables(run.folder) for run in runs]
    counted = [
        [one for step in spread_out(sorted(table), COUNTED_STEPS) if (one := _count(table[step])) is not None]
        for table in tables
    ]
    kept = " ".join(f"{run.name}: {said}." for run in runs if (said := kept_responses(run)))
    return Responses(_shown(tables, kept), _success(counted), _code_errors(counted))


def _tables(folder: Path) -> dict[int, _Table]:
    found = {}
    for path in folder.glob("rollouts/step_*.parquet"):
        step = table_step(path)
        # Retention removes tables meanwhile, and so does a run that is resumed at this moment.
        with suppress(FileNotFoundError):
            if step is not None:
                stat = path.stat()
                found[step] = _Table(step, path, stat.st_mtime_ns, stat.st_size)
    return found


@lru_cache(maxsize=4 * COUNTED_STEPS)
def _count(table: _Table) -> _Counted | None:
    """Count a step's responses; None where its table has gone in the meantime."""
    read = read_table(table.path, _COUNTED)
    if read is None:
        return None
    responses = errors = 0
    scored, correct = Counter[str](), Counter[str]()
    for row in read.slice(0, COUNTED_RESPONSES).to_pylist():
        if row["outcome"] == Outcome.INFRA:
            continue
        responses += 1
        scored[row["group_id"]] += 1
        if row["outcome"] == Outcome.CORRECT:
            correct[row["group_id"]] += 1
            errors += code_error(_said(row)) is not None
    solved = tuple((correct[group], scored[group]) for group in scored)
    return _Counted(table.step, solved, responses, correct.total(), errors)


def _success(counted: Sequence[Sequence[_Counted]]) -> Success | None:
    bars = []
    for run, steps in enumerate(counted):
        parts = ranges(len(steps), _PARTS)
        for part in parts if len(parts) < _PARTS else (parts[0], parts[-1]):
            chosen = [steps[place] for place in part]
            places = [share_bin(*pair, _QUARTERS) for one in chosen for pair in one.solved]
            if places:
                shares = [rounded(places.count(place) / len(places)) for place in range(len(_LABELS))]
                label = f"steps {chosen[0].step} to {chosen[-1].step}"
                bars.append(Bars(label, run, None, shares))
    return Success("training: groups of responses", _LABELS, bars) if bars else None


def _code_errors(counted: Sequence[Sequence[_Counted]]) -> CodeErrors:
    series = []
    for run, steps in enumerate(counted):
        some = [one for one in steps if one.correct]
        if some:
            shares = [one.errors / one.correct for one in some]
            series.append(Series(run, packed([one.step for one in some]), packed(shares)))
    read = sum(one.responses for steps in counted for one in steps)
    correct = sum(one.correct for steps in counted for one in steps)
    errors = sum(one.errors for steps in counted for one in steps)
    note = (
        f"{errors:,} of {correct:,} correct responses report an error of code that they hold (a traceback, or an "
        f"exception and its message), among {read:,} responses read: up to {COUNTED_STEPS} steps of each run, up to "
        f"{COUNTED_RESPONSES:,} responses of each"
    )
    return CodeErrors(note if read else "No responses were recorded.", series)


def _shown(tables: Sequence[dict[int, _Table]], kept: str) -> Rollouts:
    rows: list[RolloutRow] = []
    left = MOST_LETTERS
    for run, (table, steps) in enumerate(zip(tables, shared_steps(tables, SHOWN_STEPS), strict=True)):
        budget = left // (len(tables) - run)
        for place, step in enumerate(steps):
            room, used = budget // (len(steps) - place), 0
            for row in _rows_of(run, table[step]):
                letters = _letters(row)
                if used + letters > room:
                    break
                rows.append(row)
                used += letters
            budget, left = budget - used, left - used
    steps_of_all = sum(map(len, tables))
    note = (
        f"{len(rows):,} responses are on this page, of {steps_of_all:,} steps with recorded responses: up to "
        f"{SHOWN_STEPS} steps of each run, {SHOWN_PROMPTS} prompts of each (the same in all runs over the same data), "
        f"{SHOWN_RESPONSES} responses of each, {LONGEST_TEXT:,} letters of a response and {MOST_LETTERS:,} in all. The "
        f"rest is in rollouts/. {kept}"
    )
    return Rollouts(note.strip() if rows else f"No responses are there (log.rollouts). {kept}".strip(), rows)


def _letters(row: RolloutRow) -> int:
    # A token's probability and its quotes take as much room as a few letters.
    return len(row.text) + len(row.prompt) + sum(len(token) + 6 for token in row.tokens) + 150


@lru_cache(maxsize=8 * SHOWN_STEPS)
def _rows_of(run: int, table: _Table) -> list[RolloutRow]:
    found = read_table(table.path, (*_SHOWN, *_NEWER))
    records = [] if found is None else found.to_pylist()
    prompts = sorted({record["prompt_id"] for record in records}, key=prompt_rank)[:SHOWN_PROMPTS]
    chosen = [record for record in records if record["prompt_id"] in prompts and record["index"] < SHOWN_RESPONSES]
    chosen.sort(key=lambda record: (prompts.index(record["prompt_id"]), record["group_id"], record["index"]))
    seen = read_tokens(table.path, {record["group_id"] for record in chosen})
    return [
        _row(run, table.step, record, *seen.get((record["group_id"], record["index"]), ([], []))) for record in chosen
    ]


def _row(run: int, step: int, record: dict[str, Any], tokens: list[str], logps: list[float]) -> RolloutRow:
    text, shaded = str(record["text"] or ""), bool(tokens) and sum(map(len, tokens)) <= LONGEST_TEXT
    reward, length, index = record["reward"], record["length"], record["index"]
    assert isinstance(reward, float | int) and isinstance(length, int) and isinstance(index, int)
    return RolloutRow(
        run=run,
        step=step,
        problem=str(record["prompt_id"]),
        prompt=str(record.get("prompt") or "")[:LONGEST_TEXT],
        index=index,
        outcome=str(record["outcome"]),
        reward=rounded(float(reward)),
        answer=str(record["canonical_answer"] or "")[:200],
        text="" if shaded else text[:LONGEST_TEXT],
        length=length,
        tokens=tokens if shaded else [],
        probabilities=[round(100 * math.exp(logp)) for logp in logps] if shaded else [],
        dropped=str(record["dropped_reason"] or ""),
        code_error=code_error(_said(record)) or "",
        turns=_turns(record, shaded),
    )


def _places(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of a response that an environment answers; none of others, and in older tables."""
    return record.get("turn_places") or []


def _said(record: dict[str, Any]) -> str:
    """Return a response without what an environment said: a tool's report of an error is no error that was made up."""
    text, places = record["text"] or "", _places(record)
    return "\n".join(text[turn["text_start"] : turn["text_end"]] for turn in places) if places else text


def _turns(record: dict[str, Any], by_token: bool) -> list[list[float | None]]:
    prefix = "" if by_token else "text_"
    return [[turn[f"{prefix}end"], turn[f"{prefix}until"], turn["reward"]] for turn in _places(record)]
