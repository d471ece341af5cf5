"""The planner's rates against published runs: shipped numbers, and the page about them, are what the tool finds."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megasharp.planner.records import SPREAD, Rates
from megasharp.planner.suggest import make_plan
from megasharp.planner.transport import FITTED_S

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "explanation" / "planning-against-published-runs.md"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`tools/calibrate_plan.py`, with its folder on the import path."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("calibrate_plan")


def test_shipped_rates_and_ranges_are_the_fit_to_one_half(tool: ModuleType) -> None:
    fit, held_out = tool.halves(tool.read_runs())
    found = tool.rounded(tool.fit_rates(fit))
    assert {name: getattr(Rates(), name) for name in tool.FITTED} == {
        name: getattr(found, name) for name in tool.FITTED
    }
    assert {group: float(f"{factor:.3g}") for group, factor in tool.spreads(fit, held_out).items()} == dict(SPREAD)


def test_the_page_says_what_held_out_rows_say(tool: ModuleType) -> None:
    runs = tool.read_runs()
    fit, held_out = tool.halves(runs)
    page = PAGE.read_text(encoding="utf-8")
    assert "\n".join(tool.markdown(fit, held_out, [run for run in runs if run.outside])).strip() in page
    observed = tool.observe(held_out, Rates())
    for label, rows, parts in (
        ("all published numbers", observed, ["step", "update", "annotate", "rollout", "sync", "driver"]),
        ("of them steps of RL runs", observed, ["step"]),
        ("their parts", observed, ["update", "annotate", "rollout"]),
        ("hand-over of weights", observed, ["sync", "driver"]),
        ("steps of each model's RL runs", tool.without_each_model(runs), ["step"]),
    ):
        errors = [100 * abs(one.error) for one in rows if one.part in parts]
        said = f" {np.median(errors):.1f} % | {max(errors):.1f} % |"
        assert re.search(rf"^\| {label}.*\|{re.escape(said)}$", page, re.MULTILINE), (label, said)
    errors = [abs(one.error) for one in observed if one.part not in ("sync", "driver")]
    assert np.median(errors) < 0.15 and max(errors) < 0.35
    # Ranges hold what they say of rows that no fit saw.
    ranges = {"step": "step", "rollout": "engines", "update": "learners", "annotate": "learners"}
    inside = [abs(one.log) < np.log(SPREAD[ranges[one.part]]) for one in observed if one.part in ranges]
    assert sum(inside) >= 0.9 * len(inside)


def test_ranges_reach_the_one_run_with_context_parallelism(tool: ModuleType) -> None:
    (run,) = (run for run in tool.read_runs() if run.name.endswith("cp4"))
    times = {time.name: time for time in make_plan(run.request).times}
    for part in ("update", "annotate"):
        found = times[part].range
        assert found is not None and found[0] < run.published[part] < found[1], part


def test_the_drivers_constant_has_the_transport_of_the_rows_that_it_is_fitted_to(tool: ModuleType) -> None:
    fit, held_out = tool.halves(tool.read_runs())
    plans = [make_plan(run.request) for run in fit if run.kind == "rl"]
    assert max(plan.transport.seconds for plan in plans if plan.transport) == pytest.approx(FITTED_S, abs=5e-4)
    for run in (*fit, *held_out):
        assert {time.seconds for time in make_plan(run.request).times if time.name == "driver"} <= {Rates().driver_s}


def test_a_fit_finds_the_rates_that_made_the_numbers(tool: ModuleType) -> None:
    """Rows that the planner itself answers at other rates give those rates back."""
    made = Rates(mfu=0.3, logp_mfu=0.25, engine_mfu=0.5, bandwidth=0.6, sync=5e9, layer_s=4e-5, driver_s=7.0)
    rows = [run for run in tool.read_runs() if run.outside is None]
    answered = [tool.dataclasses.replace(run, published=tool.predicted_seconds(run, made)) for run in rows]
    found = tool.fit_rates(answered)
    for name in tool.FITTED:
        assert getattr(found, name) == pytest.approx(getattr(made, name), rel=0.02), name
