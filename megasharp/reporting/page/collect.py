"""The page of some runs, from their histories: everything is read here, once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megasharp.evals.result import EvalResult
from megasharp.evals.result_files import load_result
from megasharp.reporting.history import RunHistory, by_label, goodput, read_run
from megasharp.reporting.number_text import duration
from megasharp.reporting.page.evaluations import (
    choose_models,
    pass_at_k_figures,
    probed_steps,
    probes,
    read_results,
    success_figures,
)
from megasharp.reporting.page.metrics import figures, marks, stages, words
from megasharp.reporting.page.records import Difference, Page, Run
from megasharp.reporting.page.responses import read_rollouts
from megasharp.reporting.show import collapse, differences, warnings

_TELEMETRY = "gpu/utilisation"


def read_page(folders: Sequence[Path], *, live: bool, evals: Sequence[Path] = ()) -> Page:
    """Return the page of the runs in `folders`, and of the JSON files `evals` that `megasharp eval` wrote.

    Raises UserError for damaged files, and for a run that is named twice.
    """
    beside = [load_result(path) for path in evals]
    return collect(by_label([read_run(folder) for folder in folders], "report"), live=live, beside=beside)


def collect(histories: Mapping[str, RunHistory], *, live: bool, beside: Sequence[EvalResult] = ()) -> Page:
    """Collect the page of runs, by their names on it, and of evaluations besides.

    Raises UserError where a file of a run is damaged.
    """
    names, runs = list(histories), list(histories.values())
    results, unread = read_results(runs)
    evaluated = [{step for number, step, _ in results if number == place} for place in range(len(runs))]
    steps = [at | {*probed_steps(run.folder)} for at, run in zip(evaluated, runs, strict=True)]
    models = choose_models(runs, names, steps, beside)
    responses = read_rollouts(runs)
    success = success_figures(results, models)
    timed = [stages(number, run) for number, run in enumerate(runs)]
    unmetered = [name for name, run in histories.items() if not run.series(_TELEMETRY)]
    telemetry = (
        f"No NVML telemetry was recorded by {', '.join(unmetered)}: it needs an NVIDIA GPU on the driver's node."
        if unmetered
        else ""
    )
    return Page(
        title=", ".join(names),
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        live=live,
        words=[*words(runs, names, results), *unread],
        runs=[_run(name, run) for name, run in histories.items()],
        models=models.all,
        differences=[Difference(key, values) for key, values in differences(runs).items()] if len(runs) > 1 else [],
        figures=figures(runs, results),
        pass_at_k=pass_at_k_figures(results, models),
        success=[*success, *([responses.success] if responses.success else [])],
        probes=probes(runs, models),
        rollouts=responses.shown,
        code_errors=responses.code_errors,
        stages=[one for one in timed if one is not None],
        telemetry=telemetry,
    )


def _run(name: str, run: RunHistory) -> Run:
    of = f" of {run.steps}" if run.steps else ""
    spent = goodput(run)
    facts = [f"{run.state}, step {run.last_step}{of}", f"{run.tokens:,} response tokens"]
    if spent.share is not None:
        facts.append(f"wall time {duration(spent.wall)}, goodput {spent.share:.0%}")
    # The page's first sentences report collapse, with intervals.
    beside = [line for line in warnings(run) if line not in [*collapse(run)]]
    facts.append(f"seed {run.config.get('seed', 'unknown')}")
    return Run(name, str(run.folder), facts, marks(run), beside)
