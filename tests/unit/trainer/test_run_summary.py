"""The end of a run: summary.json, the screen and the report have the same figures, at a cost that does not grow."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megasharp.checkpoint.attempts import ATTEMPT_FILE, AttemptRecord
from megasharp.checkpoint.run_folder import RunFolder
from megasharp.checkpoint.store import CheckpointStore, RunState
from megasharp.common.control import BestFigure, ControlState
from megasharp.evals.result import EvalResult, EvalSetting, summarize
from megasharp.evals.result_files import save
from megasharp.evals.samples import ProblemResult
from megasharp.evals.suites import Suite
from megasharp.metrics.writers import read_metrics, rows_of, sampled_rows
from megasharp.reporting import curves, passk
from megasharp.reporting.history import goodput, read_run, suite_figures
from megasharp.reporting.number_text import duration
from megasharp.reporting.page.serve import read_page
from megasharp.reporting.show import peak_of, screen, warnings
from megasharp.trainer.run_summary import summarize_run
from megasharp.trainer.step_log import AttemptTotals
from tests.unit.reporting.report.page_runs import numbers
from tests.unit.saving import save_at_once

STEPS = 6
CONFIG = """name: mine
steps: {steps}
model: {{path: base}}
checkpoint: {{keep_best: eval/dev/pass@1}}
eval: {{suites: [dev, other], k: [1, 4], n: 4}}
"""
SUITES = [Suite(name, "countdown", ()) for name in ("dev", "other")]


def evaluated(suite: str, step: int, correct: int) -> EvalResult:
    """Two problems of four samples, one of them with so many correct ones."""
    rows = [
        ProblemResult(f"p{number}", 4, found, min(found, 1), 4 - found, 0, 0, 0, 0, 40, 0, None)
        for number, found in enumerate((correct, 1))
    ]
    return summarize(rows, EvalSetting(suite, "mine", step, 4, (1, 4), 1.0, 1), 1.0)


def trained(step: int, **figures: float) -> dict[str, float]:
    """The row of a step."""
    own = {"reward/mean": step / 10, "rollout/tokens": 100.0, "batch/padding": 0.1 * step, **figures}
    return {"step": step, "time": 1000.0 + 10 * step, "time/step": 2.0, "time/update": 2.0, **own}


@dataclass(frozen=True)
class Stopped:
    """A run that was killed after step 5, went on after step 4 and ended after step 6; all its evaluations."""

    root: Path
    control: ControlState
    evaluations: dict[tuple[int, str], EvalResult]

    def end(self, last: int = STEPS) -> dict[str, Any]:
        """Sum the run up, and return summary.json."""
        with (self.root / ".lock").open("w") as lock:
            summarize_run(
                RunFolder(self.root, 2, True, lock), SUITES, self.control, AttemptTotals(),
                first=4, last=last, stage_seconds={"update": 4.0}, say=lambda _: None,
            )  # fmt: skip
        found: dict[str, Any] = json.loads((self.root / "summary.json").read_text())
        return found


@pytest.fixture
def run(tmp_path: Path) -> Stopped:
    """Its evaluation after step 2 (the best) has no file, of that after step 4 one suite has no row.

    What it had after step 5 the first time lies in `superseded`, a better evaluation too.
    """
    root = tmp_path / "mine"
    root.mkdir()
    (root / "config.yaml").write_text(CONFIG.format(steps=STEPS))
    corrects = {0: 1, 2: 4, 4: 2, 6: 3}
    found = {(step, suite): evaluated(suite, step, n) for step, n in corrects.items() for suite in ("dev", "other")}
    rows: list[dict[str, float]] = []
    for step in range(STEPS + 1):
        rows += [trained(step)] if step else []
        for suite in ("dev", "other"):
            if (step, suite) in found and (step, suite) != (4, "other"):
                rows.append({"step": step, "time": 1000.0 + 10 * step, **found[step, suite].figures()})
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for (step, _), result in found.items():
        save(result, root / "evals" / f"step_{step:06d}")
    shutil.rmtree(root / "evals" / "step_000002")
    aside = root / "superseded" / "attempt_1"
    save(evaluated("dev", 5, 4), aside / "evals" / "step_000005")
    (aside / "metrics.jsonl").write_text(json.dumps(trained(5, **{"eval/dev/pass@1": 1.0})) + "\n")
    attempts = {
        1: AttemptRecord(started=1000.0, seen=1060.0, first_step=1, last_step=5, seconds={"update": 10.0, "eval": 3.0}),
        2: AttemptRecord(
            started=1100.0, seen=1110.0, ended=1110.0, reason="finished", exit_code=0, from_step=4, first_step=5,
            last_step=6, seconds={"update": 4.0},
        ),
    }  # fmt: skip
    for number, record in attempts.items():
        folder = root / "logs" / f"attempt_{number}"
        folder.mkdir(parents=True)
        (folder / ATTEMPT_FILE).write_text(record.model_dump_json())
    control = ControlState(best={"eval/dev/pass@1": BestFigure(found[2, "dev"].pass_at_k[1], 2)})
    store = CheckpointStore(root / "checkpoints", 9, None)
    for step in (4, 6):
        state = RunState(reference="base", step=step, control=control)
        save_at_once(store, state, lambda folder: folder.joinpath("weights").write_bytes(b"x") and None)
    return Stopped(root, control, found)


def shown(root: Path) -> str:
    """The run's screen on one line."""
    console = Console(width=300)
    with console.capture() as captured:
        console.print(screen(read_run(root)))
    return " ".join(captured.get().split())


def test_summary_screen_and_report_have_the_same_figures(run: Stopped) -> None:
    summary, history = run.end(), read_run(run.root)
    text, page = shown(run.root), read_page([run.root], live=False)
    facts = " | ".join(page.runs[0].facts)
    # Steps and restarts; seconds of both attempts.
    assert summary["steps"] == history.last_step == STEPS
    assert "step 6 of 6" in text and "step 6 of 6" in facts and "1 restart" in text and "1 restart" in facts
    assert summary["seconds"] == {"update": 14.0, "eval": 3.0}
    spent = goodput(history)
    assert spent.evaluation == 3.0 and spent.share is not None
    for told in (f"{spent.share:.0%}", duration(spent.wall)):
        assert told in text and told in facts
    # The last row, as the curves end.
    assert summary["last"] == history.training[-1]
    drawn = {
        figure.name: dict(zip(numbers(figure.series[0].x), numbers(figure.series[0].y), strict=True))
        for figure in page.figures
    }
    assert drawn["reward/mean"][6.0] == pytest.approx(summary["last"]["reward/mean"])
    assert re.search(r"reward \S+ 0\.100 0\.600 at 6 0\.600", text)
    # The peak, which only a row has.
    peak = peak_of(history)
    assert peak is not None and " ".join(peak.line.split()) in text and peak.line in facts
    assert summary["peak"] == json.loads(json.dumps(peak.tree(history.evaluations)))
    assert (peak.step, peak.last_step, peak.kept) == (2, 6, False)
    # pass@k and distinct correct answers of every suite, before and after.
    for suite in ("dev", "other"):
        for when, step in (("before", 0), ("after", STEPS)):
            result = run.evaluations[step, suite]
            pass_at_k, distinct = suite_figures(history.evaluations[step], suite)
            assert summary["pass_at_k"][suite][when] == {str(k): value for k, value in pass_at_k.items()}
            assert pass_at_k == result.pass_at_k
            assert summary["distinct_correct"][suite][when] == distinct == result.distinct_correct
            assert drawn[f"eval/{suite}/distinct_correct"][float(step)] == pytest.approx(distinct, rel=1e-4)
    curves = {one.suite: one for one in page.pass_at_k}
    last = next(place for place, model in enumerate(page.models) if model.step == STEPS)
    for suite in ("dev", "other"):
        (points,) = (one.points for one in curves[suite].models if one.model == last)
        expected = {float(k): value for k, value in summary["pass_at_k"][suite]["after"].items()}
        assert {point[0]: point[1] for point in points} == pytest.approx(expected, rel=1e-4)


def test_an_evaluation_counts_whether_its_row_or_its_file_is_missing(run: Stopped) -> None:
    """After step 2 there are rows alone, after step 4 of one suite a file alone; what was superseded counts nowhere."""
    history = read_run(run.root)
    for suite in ("dev", "other"):
        expected = [(step, run.evaluations[step, suite].pass_at_k[1]) for step in (0, 2, 4, 6)]
        assert history.series(f"eval/{suite}/pass@1") == expected
        (figure,) = (one for one in read_page([run.root], live=False).figures if one.name == f"eval/{suite}/pass@1")
        assert numbers(figure.series[0].x) == [0.0, 2.0, 4.0, 6.0]


def test_a_summary_of_an_earlier_end_is_named_and_not_read(run: Stopped) -> None:
    run.end()
    assert not any("summary.json" in line for line in warnings(read_run(run.root)))
    with (run.root / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(trained(7)) + "\n")
    told = "summary.json is of step 6 and the run of step 7; its end writes it anew"
    assert told in warnings(read_run(run.root)) and told in shown(run.root)
    assert told in read_page([run.root], live=False).runs[0].warnings
    assert "step 7 of 6" in shown(run.root)


def bytes_read(work: Callable[[], object]) -> int:
    """The bytes that this process reads from files meanwhile."""

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = so_far()
    work()
    return so_far() - before


def lengthen(run: Stopped, steps: int) -> None:
    """Give the run so many steps, with rows of 1 kB."""
    rows = read_metrics(run.root)
    begun = [row for row in rows if (row["step"] or 0) < STEPS]
    ended = [{**row, "step": steps} for row in rows if row["step"] == STEPS]
    row = json.dumps({**trained(-1), **{f"policy/metric_{number}": 0.123456789 for number in range(28)}})
    between = (row.replace('"step": -1', f'"step": {step}') for step in range(STEPS, steps))
    lines = [*map(json.dumps, begun), *between, *map(json.dumps, ended)]
    (run.root / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run.root / "evals" / f"step_{STEPS:06d}").rename(run.root / "evals" / f"step_{steps:06d}")


def test_the_end_of_a_long_run_reads_no_more_than_that_of_a_short_one(
    run: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 MB of rows less than 4, and the figures are the same. Pictures are left out: they read fonts."""
    monkeypatch.setattr(passk, "plot_pass_at_k", lambda _, path, *others: path)
    monkeypatch.setattr(curves, "plot_training", lambda _, path, events: path)
    short = run.end()
    few = bytes_read(run.end)
    lengthen(run, 20_000)
    assert (run.root / "metrics.jsonl").stat().st_size > 20e6
    many = bytes_read(lambda: run.end(20_000))
    assert many - few < 4e6
    long = json.loads((run.root / "summary.json").read_text())
    assert long["peak"] == {**short["peak"], "last_step": 20_000, "last_kept": False}
    assert long["last"] == {**short["last"], "step": 20_000}
    assert {**long, "steps": STEPS, "peak": 0, "last": 0, "peak_rss_bytes": 0} == {
        **short, "peak": 0, "last": 0, "peak_rss_bytes": 0
    }  # fmt: skip


def test_rows_of_a_long_log_are_found_by_their_step_and_sampled_evenly(run: Stopped) -> None:
    """Also the first and the last, and of a step that is not there none; a torn line at the end is left out."""
    assert sampled_rows(run.root, 3) == read_metrics(run.root)
    lengthen(run, 20_000)
    rows = read_metrics(run.root)
    for step in (0, 2, 6, 9_999, 19_999, 20_000, 20_001):
        assert rows_of(run.root, step) == [row for row in rows if row["step"] == step]
    with (run.root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20001, "rew')
    sampled = sampled_rows(run.root, 100)
    assert sampled[0] == rows[0] and sampled[-1] == rows[-1] and len(sampled) < 200
    steps = [row["step"] or 0 for row in sampled if (row["step"] or 0) < 19_000]
    assert max(after - before for before, after in pairwise(steps)) < 300
    assert steps == sorted(set(steps), key=steps.index)


def test_means_of_an_attempt_are_over_the_steps_that_have_the_metric() -> None:
    totals = AttemptTotals()
    assert totals.mean("batch/padding") is None and totals.largest_gap is None
    for row in ({"batch/padding": 0.1}, {"batch/padding": float("nan")}, {"batch/padding": 0.3}, {}):
        totals.add({**row, "rollout/tokens": 5.0})
    totals.add({"policy/engine_gap": 0.2})
    totals.add({"policy/engine_gap": 0.1})
    assert totals.tokens == 20.0 and totals.mean("batch/padding") == pytest.approx(0.2)
    assert totals.mean("policy/engine_gap") == pytest.approx(0.15) and totals.largest_gap == 0.2
