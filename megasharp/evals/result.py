"""What an evaluation found: figures of a suite, a row per problem, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd

from megasharp.errors import UserError
from megasharp.evals.passk import pass_at_k_mean
from megasharp.files import completed


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """One problem's samples. `samples` counts the judged ones, so not `infra`; `tokens` is over all.

    `correct`, `wrong`, `format`, `error`, `timeout` and `infra` count outcomes, `distinct_correct` the
    canonical answers among the correct ones, `truncated` responses that met the length limit.
    """

    id: str
    samples: int
    correct: int
    distinct_correct: int
    wrong: int
    format: int
    error: int
    timeout: int
    infra: int
    tokens: int
    truncated: int
    greedy_correct: bool | None


@dataclass(frozen=True, slots=True)
class EvalSetting:
    """What was measured: which suite and model, how many samples per problem, how they were drawn."""

    suite: str
    label: str
    step: int | None
    n: int
    ks: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One model on one suite. All figures are over the problems that were not left out.

    `avg_at_n` is the mean share of correct samples, `pass_at_n` the share of problems with a correct sample
    among all their samples; `greedy_accuracy` is None where greedy was not asked for; `mean_length` in
    tokens; `truncated` a share of responses; `infra` counts samples; `seconds` is wall-clock time,
    verification included.

    Example: `EvalResult(suite="countdown_dev", label="before", step=0, n=64, temperature=1.0, seed=1,
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

    def figures(self) -> dict[str, float]:
        """Metrics by name, `eval/<suite>/pass@1` and so on."""
        values = {
            **{f"pass@{k}": value for k, value in self.pass_at_k.items()},
            "avg@n": self.avg_at_n,
            "pass@n": self.pass_at_n,
            "distinct_correct": self.distinct_correct,
            "length_mean": self.mean_length,
            "truncated": self.truncated,
            "infra": float(self.infra),
        }
        if self.greedy_accuracy is not None:
            values["greedy"] = self.greedy_accuracy
        return {f"eval/{self.suite}/{name}": value for name, value in values.items()}


def summarize(rows: Sequence[ProblemResult], setting: EvalSetting, seconds: float) -> EvalResult:
    """The figures of `rows`; a problem with fewer than max(ks) judged samples is left out of all of them.

    Raises:
        UserError: no problem is left.
    """
    needed = max(setting.ks)
    kept = [row for row in rows if row.samples >= needed]
    if not kept:
        raise UserError(
            f"suite {setting.suite}: infra failures left no problem with {needed} samples; "
            "mend the machine that verifies and repeat"
        )
    correct, samples = [row.correct for row in kept], [row.samples for row in kept]
    responses = sum(row.samples + row.infra for row in kept)
    judged_greedy = [row.greedy_correct for row in kept if row.greedy_correct is not None]
    return EvalResult(
        suite=setting.suite,
        label=setting.label,
        step=setting.step,
        n=setting.n,
        temperature=setting.temperature,
        seed=setting.seed,
        problems=len(kept),
        left_out=len(rows) - len(kept),
        pass_at_k={k: pass_at_k_mean(correct, samples, k) for k in sorted(set(setting.ks))},
        avg_at_n=pass_at_k_mean(correct, samples, 1),
        pass_at_n=sum(count > 0 for count in correct) / len(kept),
        greedy_accuracy=sum(judged_greedy) / len(judged_greedy) if judged_greedy else None,
        distinct_correct=sum(row.distinct_correct for row in kept) / len(kept),
        mean_length=sum(row.tokens for row in kept) / responses,
        truncated=sum(row.truncated for row in kept) / responses,
        infra=sum(row.infra for row in rows),
        tokens=sum(row.tokens for row in rows),
        seconds=seconds,
        rows=tuple(rows),
    )


def stored_figures(path: Path) -> dict[str, float]:
    """The metrics of a result that `save` wrote as `path`, bit for bit those of the result itself."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    tree["pass_at_k"] = {int(k): value for k, value in tree["pass_at_k"].items()}
    return EvalResult(**tree, rows=()).figures()


def save(result: EvalResult, folder: Path) -> Path:
    """Write `folder`/<suite>.parquet (a row per problem), then <suite>.json (the rest); return its path.

    Raises:
        UserError: a file cannot be written.
    """
    names = [column.name for column in fields(ProblemResult)]
    table = pd.DataFrame([asdict(row) for row in result.rows], columns=names)
    with completed(folder / f"{result.suite}.parquet") as temporary:
        table.astype({"greedy_correct": "boolean"}).to_parquet(temporary, index=False)
    figures = {name: value for name, value in asdict(result).items() if name != "rows"}
    path = folder / f"{result.suite}.json"
    with completed(path) as temporary:
        temporary.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path
