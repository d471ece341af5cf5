"""The page on file formats names every column and field that is written, with its type."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pyarrow as pa
from cases import each_case

from megasharp.checkpoint import rollout_store
from megasharp.checkpoint.attempts import AttemptRecord
from megasharp.checkpoint.manifest import Inputs, Manifest, SourceEntry
from megasharp.common.formats import FORMATS
from megasharp.convert.lora import _Record as AdapterRecord
from megasharp.convert.record import Conversion
from megasharp.evals import probe, result_files, stored_samples
from megasharp.evals.result import EvalResult
from megasharp.metrics import response_table
from megasharp.metrics.trackers.watch import Record as TrackerRecord
from megasharp.planner.text import plan_tree
from megasharp.reporting.history import Peak
from megasharp.trainer.run_summary import summarize_run

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "file-formats.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def type_text(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list[{type_text(kind.value_type)}]"
    if pa.types.is_struct(kind):
        return "{" + ", ".join(f"{field.name}: {type_text(field.type)}" for field in kind) + "}"
    return {"double": "float64", "float": "float32"}.get(str(kind), str(kind))


@each_case(
    ("title", "schema"),
    [
        ("`rollouts/step_N.parquet`", response_table.response_schema()),
        ("`rollout_tokens/step_N.parquet`", response_table.token_schema()),
        ("`probe/responses.parquet`", probe._response_schema()),
        ("`probe/step_N.parquet`", probe.token_schema()),
        ("`rollouts.parquet`", rollout_store._unfinished_schema()),
        ("`replay.parquet`", rollout_store._replay_schema()),
        ("`<suite>.parquet`", result_files._schema()),
        ("`samples/<suite>-00000.parquet`", stored_samples.columns()),
    ],
)
def test_columns_are_named_in_their_order_with_their_types(title: str, schema: pa.Schema) -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section(title), flags=re.MULTILINE)
    assert rows == [(field.name, type_text(field.type)) for field in schema]


def written_by(function: object) -> set[str]:
    """The keys at the top of the tree that a function makes."""
    return set(re.findall(r'^        "(\w+)":', inspect.getsource(function), flags=re.MULTILINE))  # type: ignore[arg-type]


@each_case(
    ("title", "names"),
    [
        ("`logs/attempt_K/attempt.json`", {*AttemptRecord.model_fields}),
        ("`trackers/<name>.json`", {*TrackerRecord.model_fields}),
        ("`summary.json`", written_by(summarize_run) | {field.name for field in dataclasses.fields(Peak)}),
        ("Checkpoint", {*AdapterRecord.model_fields}),
        ("`manifest.json`", {*Manifest.model_fields, *Inputs.model_fields, *SourceEntry.model_fields}),
        ("`<suite>.json`", {field.name for field in dataclasses.fields(EvalResult)} - {"rows"}),
        ("Conversion", {*Conversion.model_fields}),
        ("Plan", written_by(plan_tree)),
    ],
)
def test_fields_are_named(title: str, names: set[str]) -> None:
    assert len(names) > 3
    assert names - set(re.findall(r"`(\w+)`", section(title))) == set()


def test_formats_are_the_newest() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \|.*\| (\d+) \|$", section("Formats and versions"), flags=re.MULTILINE)
    assert {kind: int(number) for kind, number in rows} == dict(FORMATS)
