"""`megasharp sweep --results`: the finished runs' table, CSV and picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.common.files import completed, write_text
from megasharp.evals.estimators import means
from megasharp.reporting.history import RunHistory, read_run
from megasharp.reporting.passk import Banded, plot_frontier, plot_panels
from megasharp.reporting.sweeps.grid import Cell, SweepConfig
from megasharp.reporting.sweeps.results import Measured, Row, frame, markdown, measure, rows

_PASS = re.compile(r"pass@\d+")


def write_results(
    config: SweepConfig, cells: Sequence[Cell], finished: Mapping[Cell, Path], out: Path
) -> tuple[str, list[Path]]:
    """Write results.md, results.csv, pass_at_k.png and frontier.png to `out`; return the table and the paths.

    The table of a part of the runs is marked as partial. Raises UserError where nothing is finished.
    """
    if not finished:
        raise UserError(f"{config.name}: none of its {len(cells)} runs is finished")
    histories = {cell: read_run(folder) for cell, folder in finished.items()}
    suite = config.results.suite or _only_suite(next(iter(histories.values())))
    measured = _measured(config, histories, suite)
    _check_ks(config, measured)
    # The first row of the case that the others are compared with.
    against = next((cell.row for cell in cells if cell.case == config.results.against), None)
    table = rows(measured, against)
    part = "" if len(finished) == len(cells) else f"**Partial: {len(finished)} of {len(cells)} runs are finished.** "
    text = (
        f"{part}{config.name} on {suite}: mean over runs [95% interval over problems]"
        "<br>lowest to highest run. Entropy in nats.\n\n"
    ) + markdown(table, config.results.k, against)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "results.md", text)
    with completed(out / "results.csv") as temporary:
        frame(measured).to_csv(temporary, index=False, float_format="%.6g")
    beside = [name for name in (_before(config), against) if name in measured]
    picture = plot_panels({row.name: _banded(row) for row in table}, beside, config.name, out / "pass_at_k.png")
    # The smallest k of the table against the largest.
    ks = min(config.results.k), max(config.results.k)
    found = {name: [means(run.figures) for run in runs] for name, runs in measured.items()}
    points = {name: [(one[f"pass@{ks[0]}"], one[f"pass@{ks[1]}"]) for one in each] for name, each in found.items()}
    frontier = plot_frontier(points, ks, config.name, out / "frontier.png")
    return text, [out / "results.md", out / "results.csv", picture, frontier]


def _measured(config: SweepConfig, histories: Mapping[Cell, RunHistory], suite: str) -> dict[str, list[Measured]]:
    """Measure the runs by row, in the sweep's order; the model before training comes first."""
    found: dict[str, list[Measured]] = {}
    before = config.results.before
    if before is not None:
        first = [measure(run, suite, cell.seed, first=True) for cell, run in histories.items() if cell.case == before]
        found[_before(config)] = first
    for cell, run in histories.items():
        found.setdefault(cell.row, []).append(measure(run, suite, cell.seed))
    return found


def _check_ks(config: SweepConfig, measured: Mapping[str, Sequence[Measured]]) -> None:
    """Raise UserError where a run was not measured at each k that the table shows."""
    for runs in measured.values():
        for one in runs:
            known = sorted(int(name.removeprefix("pass@")) for name in one.figures if _PASS.fullmatch(name))
            missing = [str(k) for k in config.results.k if k not in known]
            if missing:
                raise UserError(
                    f"{config.name}: results.k: {', '.join(missing)} was not measured (eval.k); there is "
                    f"{', '.join(map(str, known))}"
                )


def _before(config: SweepConfig) -> str:
    return "base" if config.results.before is not None else ""


def _only_suite(history: RunHistory) -> str:
    suites = sorted({path.stem for path in (history.folder / "evals").glob("step_*/*.json")})
    if len(suites) != 1:
        raise UserError(f"results.suite: say which; {history.folder} was evaluated on {', '.join(suites) or 'none'}")
    return suites[0]


def _banded(row: Row) -> Banded:
    found = {int(name.removeprefix("pass@")): row.figures[name] for name in row.figures if _PASS.fullmatch(name)}
    return Banded(
        {k: estimate.mean for k, estimate in found.items()},
        {k: estimate.interval.low for k, estimate in found.items()},
        {k: estimate.interval.high for k, estimate in found.items()},
    )
