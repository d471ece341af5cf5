"""Published runs (`tools/data/published_runs.yaml`) as questions to the planner, and both answers in seconds.

A row's workload becomes a `Request` of the planner, whole plans are made of it, and what the source prints in another
unit (FLOP/s, tokens or requests a second, milliseconds a token) is converted to seconds. Nothing here needs a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from megasharp.config.policy import PolicyConfig
from megasharp.convert.hf_folder import read_config
from megasharp.planner.formulas import Lengths, forward_flops_per_token
from megasharp.planner.records import (
    GPUS,
    Batch,
    Engines,
    Gpu,
    Kept,
    Limits,
    Machines,
    Network,
    Passes,
    Rates,
    Request,
)
from megasharp.planner.seconds import longest_response_seconds
from megasharp.planner.suggest import make_plan

REPOSITORY = Path(__file__).resolve().parents[1]
DATA = REPOSITORY / "tools" / "data" / "published_runs.yaml"
_MODELS = REPOSITORY / "configs" / "model"
_NODE = 8

Kind = Literal["rl", "training", "sampling", "decoding", "sync"]

# GPUs of rows that are shown alone. NVIDIA's data sheets: GB200 (one of the two GPUs: 186 GB, 8 TB/s, 2,500 TFLOPS
# dense), H20 (96 GB, 4.0 TB/s, 148 TFLOPS).
_OTHER_GPUS = {
    "gb200": Gpu("gb200", 186e9, 8.0e12, 2500e12, 1800e9, 50e9),
    "h20": Gpu("h20", 96e9, 4.0e12, 148e12, 900e9, 50e9),
}


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One row: what the source prints, in seconds by part, and the workload as a request.

    `outside` is the class that keeps it out of fit and test; None where it takes part. `overlapped`: the exchange
    between tensor-parallel ranks costs nothing there.
    """

    name: str
    kind: Kind
    outside: str | None
    url: str
    date: str
    published: Mapping[str, float]
    assumed: Mapping[str, str]
    request: Request
    overlapped: bool


def read_runs(path: Path = DATA) -> list[PublishedRun]:
    """Read every row. Raises KeyError or TypeError where one lacks what its kind needs."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [_run(name, row, tree["models"]) for name, row in tree["runs"].items()]


def predicted_seconds(run: PublishedRun, rates: Rates) -> dict[str, float]:
    """Predict the seconds of every part that the source prints, and of the step where it prints one.

    Refitting co-located engines takes the weights' way and that of what is offloaded, as the source measures it.
    """
    if run.overlapped:
        rates = dataclasses.replace(rates, links=math.inf)
    request = dataclasses.replace(run.request, rates=rates)
    plan = make_plan(request)
    if run.kind == "decoding":
        assert plan.engine is not None
        whole = longest_response_seconds(request, plan.engine) or 0.0
        return {"rollout": whole / request.batch.lengths.response_longest}
    times = {time.name: time.seconds or 0.0 for time in plan.times}
    if run.kind == "sync":
        return {"sync": times["sync"]}
    found = times | {"sync": times.get("sync", 0.0) + times.get("offload", 0.0), "step": plan.step_seconds or 0.0}
    return {part: found[part] for part in run.published}


def _run(name: str, row: Mapping[str, Any], models: Mapping[str, Mapping[str, int]]) -> PublishedRun:
    request = _request(name, row, _network(row["model"], models))
    return PublishedRun(
        name=name,
        kind=row["kind"],
        outside=row.get("outside"),
        url=row["source"]["url"],
        date=str(row["source"]["date"]),
        published={part: _seconds(row, request, value) for part, value in row["published"].items()},
        assumed=row.get("assumed", {}),
        request=request,
        overlapped=row.get("overlapped", False),
    )


def _seconds(row: Mapping[str, Any], request: Request, value: float) -> float:
    """Convert a printed value to seconds."""
    match row.get("as"):
        case None:
            return value
        case "tpot_ms":
            return value / 1e3
        case "requests_per_second":
            return float(row["requests"]) / value
    tokens = request.batch.sequences * request.batch.lengths.response
    if row["as"] == "tokens_per_second":
        return float(tokens / (row["gpus"] * value))
    assert row["as"] == "tflops", row["as"]
    # Megatron-LM counts all positions of attention, also those that no token sees.
    flops = 3 * tokens * forward_flops_per_token(request.policy.architecture, request.batch.lengths.response)
    return float(flops / (row["gpus"] * value * 1e12))


@cache
def _read(folder: Path) -> Network:
    _, family, architecture = read_config(folder)
    return Network(folder.name, family, architecture)


def _network(name: str, models: Mapping[str, Mapping[str, int]]) -> Network:
    if name not in models:
        return _read(_MODELS / name)
    like = _read(_MODELS / "llama-3.1-8b-instruct")
    sizes: dict[str, Any] = {"num_layers" if key == "layers" else key: value for key, value in models[name].items()}
    return dataclasses.replace(like, name=name, architecture=dataclasses.replace(like.architecture, **sizes))


def _request(name: str, row: Mapping[str, Any], network: Network) -> Request:
    asked, gpus = row.get("engines"), row["gpus"]
    apart = asked.get("gpus", 0) if asked else 0
    split = _split(row, gpus - apart if row["kind"] in ("rl", "training") else 1)
    engines = None
    if row["kind"] == "sync":
        engines = Engines(count=1, tp=1, colocated=False, transport="nccl", overlap=False)
    elif asked is not None:
        shared = row["kind"] == "rl" and not apart
        engines = Engines(
            count=(apart or gpus) // asked["tp"],
            tp=asked["tp"],
            colocated=shared,
            transport="ipc" if shared else "nccl",
            overlap=bool(apart),
            memory_fraction=asked.get("memory_fraction"),
        )
    passes = row.get("passes", ["old", "reference"] if row["kind"] == "rl" else [])
    return Request(
        name=name,
        policy=network,
        memory=None,
        width=2,
        split=split,
        batch=_batch(row),
        passes=Passes((), "old" in passes, "reference" in passes),
        engines=engines,
        machines=Machines(-(-gpus // _NODE), _NODE, (GPUS | _OTHER_GPUS)[row["gpu"]]),
        rates=Rates(),
        kept=Kept(
            steps=1, every=1, checkpoints=0, export_hf=False, tables=0, token_tables=0, tokens=0, tensorboard=False
        ),
        limits=Limits(None, None, {}),
    )


def _split(row: Mapping[str, Any], ranks: int) -> PolicyConfig:
    layout: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "recompute": "none"} | row.get("policy", {})
    longest = row.get("lengths", {}).get("longest", row.get("lengths", {}).get("response", 4096))
    budget = longest if row["kind"] in ("rl", "training") else 4096
    dp = max(1, ranks // (layout["tp"] * layout["pp"] * layout["cp"]))
    return PolicyConfig(dp=dp, micro_batch_tokens=budget, offload=["weights", "gradients", "optimizer"], **layout)


def _batch(row: Mapping[str, Any]) -> Batch:
    """The batch, each prompt repeated for each of its responses: no other trainer shares them."""
    lengths, batch = row.get("lengths", {"response": 1}), row.get("batch", {})
    sequences = row.get("requests") or batch.get("sequences") or batch.get("prompts", 1) * batch.get("responses", 1)
    prompt, response = lengths.get("prompt", 0), lengths["response"]
    limit = lengths.get("longest", response)
    # RL rows print the limit of prompt and response together.
    longest = limit - prompt if row["kind"] == "rl" else limit
    return Batch(sequences, 1, batch.get("mini_batches", 1), 0.0, Lengths(prompt, prompt, response, longest))
