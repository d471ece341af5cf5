"""What a later release wrote is refused in one line by whoever reads it; every format number has its stored files."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megasharp import __version__
from megasharp.checkpoint.manifest import read_manifest
from megasharp.checkpoint.rollout_store import read_unfinished, write_unfinished
from megasharp.checkpoint.run_folder import open_run, stored_config
from megasharp.checkpoint.store import CheckpointStore
from megasharp.common.errors import UserError
from megasharp.common.formats import FORMATS, NewerFormat, Stored, read_stamp, read_table_stamp, stamp, table_stamp
from megasharp.common.records import Completion, FinishReason
from megasharp.convert.record import read_record, recorded_arguments
from megasharp.evals.probe import read_responses, read_table, token_schema
from megasharp.evals.result_files import load_result, stored_figures
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.stored_samples import SamplesInfo, read_samples
from megasharp.metrics.response_table import read_table as read_rows
from megasharp.reporting.history import read_run
from megasharp.reporting.page.responses import read_rollouts
from megasharp.rollout.in_flight import Unfinished
from megasharp.trainer.eval_source import measured
from tests.unit.evals.stored import sample

STORED = Path(__file__).parents[1] / "stored"
RUN, CHECKPOINT = Path("runs/old"), Path("runs/old/checkpoints/step_000004")
LATER = {"format": 99, "megasharp": "9.9.9"}


def json_later(path: Path) -> None:
    """Make this the file of a later release; a manifest's own digest is of that, too."""
    tree = {**json.loads(path.read_text()), **LATER} if path.exists() else {**LATER, "begun": 1.0}
    if path.name == "manifest.json":
        tree.pop("sha256", None)
        tree["sha256"] = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(tree))


def table_later(path: Path) -> None:
    table = pq.read_table(path)
    later = {key: str(value) for key, value in LATER.items()}
    pq.write_table(table.replace_schema_metadata(later), path)


def with_unfinished(path: Path) -> None:
    logp = torch.zeros(1)
    response = Completion(torch.tensor([1]), logp, logp, None, (), FinishReason.STOP, 0)
    write_unfinished(path.parent, [Unfinished(0, 0, (response,), (), None)])
    table_later(path)


def with_samples(path: Path) -> None:
    store = SampleStore(path.parents[1], SamplesInfo("dev"))
    store.add([sample(0, 0)])
    store.finish()
    table_later(path)


def read_stored_samples(path: Path) -> object:
    """Those of format 3; older ones are refused in one line."""
    if path.parent.name == "samples":
        return list(read_samples(path.parents[1], "dev"))
    with pytest.raises(UserError, match=r"dev\.samples: samples in the format of an earlier release") as refused:
        SampleStore(path.parents[1], SamplesInfo("dev"))
    return str(refused.value)


# The file that is of a later release, who makes it one, and a reader by the folder in which everything is.
READERS: dict[str, tuple[Path, Callable[[Path], None], Callable[[Path], object]]] = {
    "manifest": (CHECKPOINT / "manifest.json", json_later, lambda at: read_manifest(at / CHECKPOINT)),
    "store": (
        CHECKPOINT / "manifest.json",
        json_later,
        lambda at: CheckpointStore(at / RUN / "checkpoints", 1, None).take_up(print),
    ),
    "weights of a checkpoint": (
        CHECKPOINT / "manifest.json",
        json_later,
        lambda at: recorded_arguments(at / CHECKPOINT),
    ),
    "run": (RUN / "run.json", json_later, lambda at: stored_config(at / RUN)),
    "history": (RUN / "run.json", json_later, lambda at: read_run(at / RUN)),
    "evaluation of its weights": (RUN / "run.json", json_later, lambda at: measured(at / RUN)),
    "resume": (RUN / "run.json", json_later, lambda at: open_run(at / RUN, "", resume=True)),
    "conversion": (Path("megatron/conversion.json"), json_later, lambda at: read_record(at / "megatron")),
    "evaluation": (
        Path("evals/old/step_000004/dev.json"),
        json_later,
        lambda at: load_result(at / "evals/old/step_000004/dev.json"),
    ),
    "evaluation's figures": (
        RUN / "evals/step_000004/dev.json",
        json_later,
        lambda at: stored_figures(at / RUN / "evals/step_000004/dev.json"),
    ),
    "samples": (
        Path("evals/new/samples/dev-00000.parquet"),
        with_samples,
        lambda at: list(read_samples(at / "evals/new", "dev")),
    ),
    "probe's responses": (RUN / "probe/responses.parquet", table_later, lambda at: read_responses(at / RUN / "probe")),
    "probe": (
        RUN / "probe/step_000004.parquet",
        table_later,
        lambda at: read_table(at / RUN / "probe/step_000004.parquet", token_schema()),
    ),
    "unfinished": (CHECKPOINT / "rollouts.parquet", with_unfinished, lambda at: read_unfinished(at / CHECKPOINT)),
    "rollouts": (RUN / "rollouts/step_000001.parquet", table_later, lambda at: read_rollouts([read_run(at / RUN)])),
}


# Where the files of each kind lie in a folder of tests/stored, and who reads one.
FILES: dict[Stored, tuple[str, Callable[[Path], object]]] = {
    "checkpoint": ("runs/*/checkpoints/step_*/manifest.json", lambda path: read_manifest(path.parent)),
    "conversion": ("*/conversion.json", lambda path: read_record(path.parent)),
    "evaluation": ("**/evals/**/*.json", load_result),
    "evaluation samples": ("*/*samples/*", read_stored_samples),
    "probe": ("runs/*/probe/*.parquet", lambda path: read_responses(path.parent)),
    "rollouts": ("runs/*/rollout*/*.parquet", lambda path: read_rows(path, ["text"])),
    "run": ("runs/*/config.yaml", lambda path: stored_config(path.parent)),
    "unfinished rollouts": ("parts/rollouts.parquet", lambda path: read_unfinished(path.parent)),
}


def number_of(path: Path, kind: Stored) -> int:
    """The format that a stored file has; a run's is in a file beside its configuration, from format 2 on."""
    if path.suffix == ".parquet":
        return read_table_stamp(path, kind, pq.read_schema(path).metadata)
    if path.suffix == ".arrows":
        return read_table_stamp(path, kind, pa.ipc.open_stream(path.read_bytes()).schema.metadata)
    path = path.with_name("run.json") if kind == "run" else path
    return read_stamp(path, kind, json.loads(path.read_text()) if path.exists() else {})


def unseen(kind: Stored, newest: int) -> set[int]:
    """The formats of a kind of which no file is stored."""
    return {*range(1, newest + 1)} - {number_of(path, kind) for path in STORED.glob(f"*/{FILES[kind][0]}")}


@pytest.mark.parametrize("kind", FORMATS)
def test_files_of_every_format_are_stored(kind: Stored) -> None:
    """tests/README.md says how to add the folder of a new number."""
    assert unseen(kind, FORMATS[kind]) == set()
    assert unseen(kind, FORMATS[kind] + 1) == {FORMATS[kind] + 1}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_stored_file_is_read(kind: Stored) -> None:
    pattern, read = FILES[kind]
    found = [read(path) for path in STORED.glob(f"*/{pattern}")]
    assert len(found) >= FORMATS[kind] and all(content is not None and content != () for content in found)


@pytest.mark.parametrize("reader", READERS)
def test_a_later_format_is_refused_in_one_line(reader: str, tmp_path: Path) -> None:
    """The line names the file, its format, the newest that is read here, and the release that wrote it."""
    file, make_later, read = READERS[reader]
    at = Path(shutil.copytree(STORED / "2026_11_24", tmp_path / "at"))
    make_later(at / file)
    before = sorted(at.rglob("*"))
    with pytest.raises(NewerFormat) as refused:
        read(at)
    line = str(refused.value)
    assert "\n" not in line
    for word in (str(at / file), "has format 99", "written by megasharp 9.9.9", f"({__version__})"):
        assert word in line
    assert re.search(r"up to [23]: use that release", line)
    # Nothing was renamed, removed or begun; the lock of a run is its own.
    assert [path for path in sorted(at.rglob("*")) if path.name != ".lock"] == before


@pytest.mark.parametrize("number", [0, -1, True, "2", None, 1.5])
def test_a_damaged_number_is_refused(number: object) -> None:
    with pytest.raises(UserError, match=r"a.json: format .* is no number of a format"):
        read_stamp(Path("a.json"), "run", {"format": number})
    with pytest.raises(UserError, match=r"a.parquet: format 'x\?' is no number"):
        read_table_stamp(Path("a.parquet"), "probe", {b"format": b"x?"})


def test_who_wrote_it_is_said_where_it_is_recorded() -> None:
    path = Path("a.json")
    with pytest.raises(NewerFormat, match=r"written by megasharp 3.1; .*: use that release"):
        read_stamp(path, "checkpoint", {"format": 3, "software": {"megasharp": "3.1"}})
    with pytest.raises(NewerFormat, match=r"has format 3 \(checkpoint\); .*: use a newer release"):
        read_stamp(path, "checkpoint", {"format": 3})


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_written_has_the_newest_number_and_what_has_none_is_format_1(kind: Stored) -> None:
    path = Path("a")
    assert read_stamp(path, kind, stamp(kind)) == FORMATS[kind]
    table = pa.table({"a": [1]}).replace_schema_metadata(table_stamp(kind))
    assert read_table_stamp(path, kind, table.schema.metadata) == FORMATS[kind]
    assert read_stamp(path, kind, {}) == read_table_stamp(path, kind, None) == 1


def test_a_flipped_bit_is_damage_and_no_later_format(tmp_path: Path) -> None:
    """A damaged checkpoint makes way for the one before, which a later release's does not."""
    text = (STORED.parent / "golden" / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(re.sub(r'"format": \d+', '"format": 6', text))
    with pytest.raises(UserError, match="differs from what was saved") as damaged:
        read_manifest(tmp_path)
    assert not isinstance(damaged.value, NewerFormat)
