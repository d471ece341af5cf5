"""The tables and files of the benchmarks in tools: bars, what was not measured, and what is said beside the figures."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as benchmarks import it, with their folder on the import path."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("results")


def test_a_bar_is_met_from_its_own_side_and_not_by_what_was_not_measured(results: ModuleType) -> None:
    assert results.Figure("a", 0.65, "ms", bar=0.65).met is True
    assert results.Figure("a", 0.66, "ms", bar=0.65).met is False
    assert results.Figure("a", 41.0, "%", bar=40.0, better="higher").met is True
    assert results.Figure("a", 39.0, "%", bar=40.0, better="higher").met is False
    assert results.Figure("a", None, "ms", bar=0.65).met is None
    assert results.Figure("a", 1.0, "ms").met is None


def test_a_report_is_a_table_and_the_same_as_json(
    results: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = [
        results.Figure("planning", 0.125, "s", bar=0.1, repeats=5),
        results.Figure("forward", None, "ms", bar=0.65, note="needs a GPU"),
    ]
    path = results.report("bench_test", figures, {"rows": 8}, ("pytest", "no-such-package"), tmp_path)
    record = json.loads(path.read_text())
    assert path.parent == tmp_path and record["benchmark"] == "bench_test" and record["settings"] == {"rows": 8}
    assert record["versions"]["torch"] == torch.__version__ and "pytest" in record["versions"]
    assert "no-such-package" not in record["versions"]
    assert record["date"].endswith("Z") and record["device"] and record["commit"]
    assert [figure["met"] for figure in record["figures"]] == [False, None]
    assert [figure["value"] for figure in record["figures"]] == [0.125, None]
    printed = capsys.readouterr().out.splitlines()
    assert record["device"] in printed[0] and f"torch {torch.__version__}" in printed[1]
    assert printed[3].split() == ["planning", "0.125", "s", "<=", "0.1", "NO", "5"]
    assert printed[4].split() == ["forward", "not", "measured", "ms", "<=", "0.65", "needs", "a", "GPU"]


def test_one_subjects_figures_do_not_replace_anothers(results: ModuleType, tmp_path: Path) -> None:
    figures = [results.Figure("step", 1.0, "s")]
    paths = {results.report("bench_step", figures, {}, (), tmp_path, subject=name) for name in ("Qwen3 4B", "qwen3-8b")}
    assert {path.name.removeprefix("bench_step-").split("-")[1] for path in paths} == {"4b", "8b"}
    assert all(path.is_file() for path in paths)
