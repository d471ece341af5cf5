"""The tables of short runs: every run's keys are known, and a cell is of the steps that the table names."""

from __future__ import annotations

import pytest
from cases import each_case
from quickstart_tables import QUICKSTART, TABLES, Table, main, markdown

from megasharp.config.run_config import load_run
from megasharp.trainer.resolve.recipes import build_recipes


@each_case("name", list(TABLES))
def test_keys_of_all_runs_are_known(name: str) -> None:
    table = TABLES[name]
    found = [
        load_run(QUICKSTART / "run.yaml", [f"steps={table.steps}", *table.shared.split(), *keys.split()])
        for keys in table.runs.values()
    ]
    for run in found:
        build_recipes(run, name)
    assert len(found) > 1 and len({run.model_dump_json() for run in found}) == len(found), "no run is there twice"


def test_a_cell_is_the_mean_over_a_span_or_the_maximum() -> None:
    table = Table("page.md", 4, ((1, 2), (4, 4)), ("gap", "gap_max", "absent"), "", {})
    steps = [{"step": step, "gap": step / 8, "gap_max": 10.0 * step} for step in (1, 2, 3, 4)]
    assert markdown(table, {"one": steps}).splitlines()[-1] == "| one | 0.188, 0.5 | 20, 40 |  |"


def test_an_unknown_table_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["quickstart_tables.py", "gaps"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "there is no table gaps; there are gap, tuning" in capsys.readouterr().err
