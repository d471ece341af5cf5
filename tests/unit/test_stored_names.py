"""Names on disk and on the wire, as golden files in tests/golden: renaming a field or a record must not change them.

Real objects go through the code that writes them. A golden file that is to change on purpose (a new field, say) is
written anew with MEGASHARP_WRITE_GOLDEN=1; a name that is already there breaks what older versions stored, and what
engines of another version understand.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import pickle
import random
import threading
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megasharp import __version__
from megasharp.checkpoint.attempts import AttemptRecord
from megasharp.checkpoint.manifest import CursorEntry, FileEntry, Inputs, Manifest, read_manifest, write_manifest
from megasharp.checkpoint.run_folder import open_run
from megasharp.common.control import (
    BestFigure,
    ControlState,
    LengthChange,
    LengthState,
    Reset,
    ResetState,
    SpikeState,
    Watch,
)
from megasharp.common.random_state import generator_states
from megasharp.common.records import GenerateRequest, Outcome, Plausible, SamplingParams
from megasharp.config.policy import LoraConfig
from megasharp.config.rollout import RolloutConfig
from megasharp.config.run_config import load_run
from megasharp.convert.architecture import Architecture, RopeParameters, record_arguments
from megasharp.convert.lora import record_adapters, recorded_adapters
from megasharp.convert.record import Digests, write_record
from megasharp.evals.probe import ProbeResponse, write_responses
from megasharp.evals.probe import token_schema as probe_schema
from megasharp.evals.result import EvalResult, EvalSetting, averaged, save_group, summarize
from megasharp.evals.result_files import load_result, save
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.samples import Answers, ProblemResult, TokenFigures
from megasharp.evals.stored_samples import SamplesInfo
from megasharp.metrics.response_table import response_schema, token_schema
from megasharp.planner.suggest import make_plan, suggest
from megasharp.planner.text import plan_tree
from megasharp.reporting.page.records import Page
from megasharp.rollout.sglang.bucket import Header, Stamp, laid_out, parse_header, read_header, write_bucket
from megasharp.rollout.sglang.client.api import EngineApi, GroupSeat, Limits
from megasharp.rollout.sglang.client.launch import FleetSettings, engine_config
from megasharp.rollout.sglang.engine.engine_config import EngineConfig, EngineSettings
from megasharp.rollout.sglang.shared_weights import (
    DeviceHandle,
    FileHandle,
    Loan,
    Memory,
    Piece,
    memory_to_json,
    parse_loan,
)
from megasharp.tasks.judge import digest_of
from megasharp.tasks.sandbox.pool import PoolCounts
from megasharp.tasks.table import TASKS as ALL_TASKS
from megasharp.tasks.table import load_items
from megasharp.trainer.plan import Options, ask
from tests.unit.evals.stored import sample

REPOSITORY = Path(__file__).parents[2]
GOLDEN = REPOSITORY / "tests" / "golden"
# Of each task a small file in tests/golden/tasks.
TASKS = {
    "choice": "choice.jsonl",
    "code": "code.jsonl",
    "countdown": "countdown.jsonl",
    "countdown_3": "countdown_3to4.jsonl",
    "countdown_3to4": "countdown_3to4.jsonl",
    "environment": "environment.yaml",
    "form": "form.jsonl",
    "instructions": "instructions.jsonl",
    "knights": "knights.jsonl",
    "knights_short": "knights.jsonl",
    "math": "math.jsonl",
    "maze": "maze.jsonl",
    "reasoning_gym": "reasoning_gym.yaml",
    "short_answer": "short_answer.jsonl",
    "synlogic": "synlogic.jsonl",
    "tools": "tools.yaml",
}
STAMP = Stamp(12, 3, "5be1f0c9")
TENSORS = [("a.weight", torch.arange(6, dtype=torch.float32).reshape(2, 3)), ("b.weight", torch.ones(5).bfloat16())]


def frozen(name: str, value: object) -> None:
    """Compare with the golden file, the order of names included."""
    path = GOLDEN / f"{name}.json"
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    if "MEGASHARP_WRITE_GOLDEN" in os.environ:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name}: not what older versions write and read"


def read(path: Path) -> dict[str, object]:
    """A stored JSON file without the release that it names, which is this one."""
    tree: dict[str, object] = json.loads(path.read_text())
    assert tree.pop("megasharp", __version__) == __version__
    return tree


def fields_of(kind: object) -> object:
    """The names of a record's fields, those of records inside of them too."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return {field.name: fields_of(hints[field.name]) for field in dataclasses.fields(kind)}
    inner = [fields_of(argument) for argument in typing.get_args(kind)]
    told = kind.__name__ if isinstance(kind, type) and not inner else str(kind)
    return next((found for found in inner if isinstance(found, dict)), told)


def shape_of(value: object) -> object:
    """A JSON tree with types for its values, and of lists the first entry."""
    if isinstance(value, dict):
        return {name: shape_of(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shape_of(inner) for inner in value[:1]]
    return type(value).__name__


def test_every_task_is_frozen() -> None:
    assert TASKS.keys() == ALL_TASKS.keys()


@pytest.mark.parametrize("task", TASKS)
def test_problems_have_the_digest_they_had(task: str) -> None:
    """A run's manifest and an evaluation's result hold `digest_of`, which hashes the answers' repr."""
    items = load_items(task, GOLDEN / "tasks" / TASKS[task])
    # The texts of reasoning-gym are its version's.
    digest = None if task == "reasoning_gym" else digest_of(items)
    frozen(f"task_{task}", {"answers": [repr(item.answer) for item in items], "digest": digest})


def manifest() -> Manifest:
    """A checkpoint's manifest with everything in it."""
    watch = Watch(best=0.5, best_step=4, last=0.25, last_step=8, waited=1)
    control = ControlState(
        ResetState(watch, "every 3 steps", (Reset(3, "every 3 steps", ("reference", "optimizer")),)),
        LengthState(1, (0.1, 0.2), watch, "until", (LengthChange(3, 8, "step 3 is done"),)),
        {"eval/dev/pass@1": BestFigure(0.5, 4)},
        8,
        SpikeState((1.0, 2.0)),
        4096,
    )
    return Manifest(
        step=8,
        policy_version=9,
        memory_version=7,
        cursor=CursorEntry(epoch=1, position=5),
        pending=[CursorEntry(epoch=1, position=3)],
        reference="step 3",
        skipped_in_a_row=1,
        control=control,
        inputs=Inputs(problems="p", tokenizer="t", weights="w", suites={"dev": "d"}),
        files={"policy/common.pt": FileEntry(size=3, sha256="abc")},
        software={"torch": "2"},
    )


def test_a_manifest(tmp_path: Path) -> None:
    """With all of the control state; its own digest, which is over names too, is at its end."""
    write_manifest(tmp_path, manifest())
    frozen("manifest", read(tmp_path / "manifest.json"))
    assert read_manifest(tmp_path) == manifest()
    write_manifest(tmp_path, manifest().model_copy(update={"control": ControlState()}))
    frozen("control_at_start", json.loads((tmp_path / "manifest.json").read_text())["control"])


def test_an_older_manifest_is_read(tmp_path: Path) -> None:
    """The golden file itself, as a file of an older version."""
    (tmp_path / "manifest.json").write_text((GOLDEN / "manifest.json").read_text())
    assert read_manifest(tmp_path) == manifest()


def test_a_runs_record(tmp_path: Path) -> None:
    open_run(tmp_path / "run", "name: run\n", resume=False).close()
    frozen("run", shape_of(read(tmp_path / "run" / "run.json")))


def test_records_of_attempts_and_generators() -> None:
    record = AttemptRecord(started=1.0, seen=2.0, seconds={"annotate": 1.0})
    frozen("attempt", json.loads(record.model_dump_json()))
    random.seed(1)  # after `gauss` the state holds one number more
    frozen("generators", shape_of(json.loads(generator_states().model_dump_json())))


def evaluated(member: str = "dev") -> EvalResult:
    """An evaluation of two problems with all that can be measured."""
    seen = TokenFigures(0.5, 0.6, (-0.5, -2.0, -3.0), -0.6)
    answers = Answers((2, 1), (True, False), ("1+2", "1*2"), 1, 0)
    rows = [
        ProblemResult(f"p{number}", 4, 2, 1, 1, 1, 0, 0, 0, 40, 1, True, answers, seen, 3, 1) for number in range(2)
    ]
    setting = EvalSetting(member, "mine", 8, 4, (1, 2, 4), 1.0, 1, 0.9, 32, {"weights": "w", "problems": "p"})
    return summarize(rows, setting, 2.0)


def test_an_evaluations_files(tmp_path: Path) -> None:
    path = save(evaluated(), tmp_path)
    table = pq.read_table(path.with_suffix(".parquet"))
    columns = {field.name: str(field.type) for field in table.schema}
    frozen("evaluation", {"json": read(path), "columns": columns, "rows": table.to_pylist()})
    assert load_result(path) == evaluated()
    group = save_group(averaged("both", "Table 1", ["n"], {"dev": [evaluated()]}, 1), tmp_path)
    frozen("evaluation_group", read(group))


def test_an_older_evaluation_is_read(tmp_path: Path) -> None:
    """The golden JSON beside a table of today."""
    path = save(evaluated(), tmp_path)
    path.write_text(json.dumps(json.loads((GOLDEN / "evaluation.json").read_text())["json"]))
    assert load_result(path) == evaluated()


def test_samples_of_an_evaluation(tmp_path: Path) -> None:
    """While it runs, and after."""
    store = SampleStore(tmp_path, SamplesInfo("dev", {"n": 4}, {"weights": "w"}, "tokens"))
    store.add([sample(1, 3)], 1.0)
    (journal,) = (tmp_path / "samples").iterdir()
    stream = pa.ipc.open_stream(journal.read_bytes()).read_all()
    store.finish()
    (part,) = (tmp_path / "samples").iterdir()
    table = pq.read_table(part)
    meta = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert meta.pop("megasharp") == __version__
    assert stream.to_pylist() == table.to_pylist() and stream.schema.equals(table.schema)
    names = [journal.name, part.name]
    columns = {one.name: str(one.type) for one in table.schema}
    frozen("evaluation_samples", {"files": names, "columns": columns, "rows": table.to_pylist(), "metadata": meta})


def test_tables_of_rollouts_and_probes(tmp_path: Path) -> None:
    path = write_responses(tmp_path, [ProbeResponse("dev", "p0", "1 2=3:", (1, 2), (3, 4))])
    tables = {
        "rollouts": response_schema(),
        "rollout_tokens": token_schema(),
        "probe": probe_schema(),
        "probe_responses": pq.read_schema(path),
    }
    frozen("tables", {name: {one.name: str(one.type) for one in schema} for name, schema in tables.items()})


def test_sampling() -> None:
    """What is hashed, sent and stored of how tokens are drawn; the outcomes of tables and metrics."""
    full = dataclasses.asdict(SamplingParams(32, 0.7, 0.9, 5, (1, 2), 0.2, Plausible(0.1, None), 3))
    plain = dataclasses.asdict(SamplingParams(32))
    frozen("sampling", {"full": full, "plain": plain, "outcomes": [outcome.value for outcome in Outcome]})


def test_folders_of_weights(tmp_path: Path) -> None:
    rope = RopeParameters(1e6, "yarn", (("factor", 4.0), ("original_max_position_embeddings", 32768)))
    arch = Architecture(
        "qwen3", 2, 32, 4, 2, 8, 64, 22, 1e-6, rope, 131072, False, True, True, "bfloat16", (4, None), "somewhere"
    )
    record_arguments(tmp_path, arch)
    lora = LoraConfig(rank=2, alpha=16.0, targets=["qkv", "fc2"])
    record_adapters(tmp_path, lora, Path("/models/base"))
    digests = Digests()
    digests.add("a.weight", torch.ones(2), torch.bfloat16)
    write_record(tmp_path, "hf-to-megatron", Path("/models/base"), arch, digests, "float32", "bfloat16")
    conversion = json.loads((tmp_path / "conversion.json").read_text())
    assert all(isinstance(version, str) for version in conversion["software"].values())
    conversion["software"] = sorted(conversion["software"])
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("arguments", "lora")}
    frozen("weights", {**found, "conversion": conversion})
    assert recorded_adapters(tmp_path) == lora


def test_figures_of_the_pool() -> None:
    """Each becomes a metric, `reward/killed` and so on."""
    frozen("pool", dataclasses.asdict(PoolCounts(2, 1, 1)))


def test_buckets_of_weights(tmp_path: Path) -> None:
    """Between trainer and engines, in files and as text."""
    header = Header(STAMP, laid_out(TENSORS, ["00ff", "11ee"]))
    path = tmp_path / "bucket"
    write_bucket(path, STAMP, TENSORS)
    assert parse_header(header.to_json()) == header
    assert read_header(path) == Header(STAMP, laid_out(TENSORS))
    closing = Header(Stamp(12, None, "5be1f0c9")).to_json()
    frozen("bucket", {"header": header.to_json(), "closing": closing, "file": path.read_bytes().hex(" ", 64)})


def test_lent_memory() -> None:
    handles = (FileHandle("m", "n", 64), DeviceHandle("GPU-1", "ab", 64, 8, "cd", 4, "ef", True))
    pieces = (Piece("a.weight", 0, 1, (2, 3), "float32", 0, 64),)
    loan = Loan(STAMP, Memory("learner-0", 2, True, handles), "layout", pieces)
    again = Loan(STAMP, Memory("learner-0", 2, True), "layout")
    memory = memory_to_json(Memory("learner-0", 2, False, handles))
    frozen("loan", {"first": loan.to_json(), "again": again.to_json(), "memory": memory})
    assert parse_loan(loan.to_json()) == loan


def test_what_an_engine_is_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = RolloutConfig(sglang={"page_size": 16})
    settings = FleetSettings(Path("python"), Path("/m"), Path("/logs"), rollout, Path("/n"), 256)
    config = engine_config(settings, 30000, "k3y", shared=Path("/dev/shm/s"))
    monkeypatch.setenv("MEGASHARP_ENGINE", "")
    EngineSettings("/n", 64, True, "/dev/shm/s", 256).publish()
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    frozen("engine", {"config": config, "reads": names, "inherits": json.loads(os.environ["MEGASHARP_ENGINE"])})


Call = dict[str, object]


@contextmanager
def recorder() -> Iterator[tuple[EngineApi, list[Call]]]:
    """An engine that says yes to everything, and what it was asked."""
    calls: list[Call] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)))
            calls.append({"path": self.path, "authorization": self.headers["Authorization"], "body": body})
            answer: object = {"success": True, "ranks": [{"checksums": {"a": "00ff"}}]}
            if self.path == "/generate":
                answer = [{"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}] * len(body["rid"])
            text = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield EngineApi("127.0.0.1", server.server_port, "k3y"), calls
        finally:
            server.shutdown()
            thread.join()


def opened(body: dict[str, object]) -> dict[str, object]:
    """A body with its pickles opened; the loader is named by its place in the package, which both Pythons share."""
    if "serialized_named_tensors" in body:
        assert str(body["load_format"]).startswith("megasharp.")
        payloads = body["serialized_named_tensors"]
        assert isinstance(payloads, list)
        named = [pickle.loads(base64.b64decode(payload)) for payload in payloads]
        texts = [[(kind, bytes(spelled.tolist()).decode()) for kind, spelled in one] for one in named]
        return {**body, "load_format": "(ours)", "serialized_named_tensors": texts}
    return body


def test_what_an_engine_is_asked() -> None:
    """Paths and bodies of every call, as SGLang's server and our changes to it have them."""
    sampling = SamplingParams(32, 0.7, 0.9, 5, (1, 2), 0.2, Plausible(min_p=0.1), 3)
    with recorder() as (api, calls):
        request, with_memory = (
            GenerateRequest((1, 2), (7,)),
            SamplingParams(8, memory_mu=0.1, plausible=Plausible(top_k=4)),
        )
        for asked in (
            api.generate(GenerateRequest((1, 2), (7, 8), ((), (3,))), sampling, ["a", "b"], 10.0, Limits(60.0, 30.0)),
            api.generate(request, with_memory, "c", 10),
            api.read((1, 2), SamplingParams(8), "d", 10.0),
            api.abort("a"),
            api.abort(),
        ):
            asyncio.run(asked)
        api.pause("retract")
        api.proceed()
        api.flush()
        api.release(["kv_cache", "weights"])
        api.resume(["weights"])
        api.begin_update()
        api.load_file(Path("/dev/shm/bucket"), 2, 10.0)
        api.load_lent([[("loan", "{}")], [("header", "{}"), ("", "{}")]], 10.0)
        api.announce(Header(STAMP).to_json(), 1, 10.0, 12)
        api.join_group(GroupSeat("g", "gloo", "127.0.0.1", 5, 1, 3), 10.0)
        api.receive_broadcast(laid_out(TENSORS), "g", 10.0)
        api.leave_group("g", 10.0)
        api.load_folder(Path("/weights"), 12, 10.0)
        api.end_update(10.0)
        assert api.checksums(10.0) == [{"a": "00ff"}]
    frozen("engine_calls", [{**call, "body": opened(typing.cast("dict[str, object]", call["body"]))} for call in calls])


def test_the_pages_records() -> None:
    """The scripts of the page read them by these names."""
    frozen("page", fields_of(Page))


def test_a_plan_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """All names of `megasharp plan --json`, of a run with a memory network, adapters, engines and a suggestion."""
    monkeypatch.chdir(REPOSITORY)
    path = REPOSITORY / "examples" / "qwen3-32b-dlc" / "run.yaml"
    found = ask(load_run(path, ["policy.lora={rank: 8}", "checkpoint.every=50"]), str(path), Options())
    request = found.request
    tree = plan_tree(request, make_plan(request), ["a note"], suggest(request))
    frozen("plan", shape_of(json.loads(json.dumps(tree, allow_nan=False))))
