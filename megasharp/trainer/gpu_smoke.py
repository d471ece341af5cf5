"""`megasharp doctor --gpu-smoke`: tiny runs on this machine of what a large run does on a GPU, one after another.

    learner   DAPO's clipping with DLC and KL, responses by this process's own engine; a save, an end, a resume
    engines   an SGLang engine on the same GPU: policy and memory network in one server (composite DLC), CUDA graphs,
              sleep and wake around each update, weights by CUDA's handles (ipc) with every checksum compared

Both train models of four million random weights, whose heads have the size of real ones (128), on the quickstart's
problems; the reward is the share of digits, which random weights can earn. Nothing is downloaded. Each run is the
ordinary `megasharp train` in processes of its own, which end with it and at its limit; what it wrote stays in the
folder. `device` "cpu" rehearses the same without a GPU: without CUDA graphs and handles, and nothing sleeps.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from megasharp.common.errors import UserError
from megasharp.common.parent_death import ended_with_parent
from megasharp.config.core import SHIPPED, dump_tree
from megasharp.config.run_config import RunConfig, load_run
from megasharp.convert.random_model import write_random_model
from megasharp.trainer.resolve.engine_python import engine_python

Device = Literal["cuda", "cpu"]
PARTS = ("learner", "engines")
_LIMITS_S = {"learner": 180.0, "engines": 400.0}
# On a CPU, which others may use too, a rehearsal is to end well before it is to be fast.
_LIMITS_OF_REHEARSAL = 5
_QUICKSTART = SHIPPED / "examples" / "quickstart"
# Multiples of 128, heads of 128: sizes that kernels and CUDA graphs meet in real models.
_POLICY = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 512,
}  # fmt: skip
_MEMORY = {**_POLICY, "hidden_size": 128, "num_hidden_layers": 2}
_REWARD = '''def digits(text, answer):
    """Return the share of digits."""
    return sum(letter.isdigit() for letter in text) / max(1, len(text))
'''
# Nats between the engine's and the learner's log-prob of a token. Two bfloat16 programs on one policy; an engine with
# the weights of another step is ten times as far.
_GAP = 0.1
_GRAPHS = "CUDA graph end"
_OUTPUT_LINES = 15


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one part, as the doctor's findings: `text` has its figures, or what went wrong and where to read on.

    A part that is not installed here is a note.
    """

    part: str
    how: Literal["ok", "note", "FAIL"]
    text: str


def smoke(folder: Path, device: Device, parts: Sequence[str] = PARTS) -> Iterator[Outcome]:
    """Run the parts and yield how each ended; `folder` is new. The engines' Python is found as a run finds it.

    Raises UserError where the folder cannot be made or the quickstart's files are missing.
    """
    prepare(folder, device)
    for part in parts:
        began = time.monotonic()
        try:
            text = _learner(folder, device) if part == "learner" else _engines(folder, device)
            yield Outcome(part, "ok", f"{text}; {time.monotonic() - began:.0f} s")
        except _Failed as failure:
            yield Outcome(part, "FAIL", str(failure))
        except _Absent as absent:
            yield Outcome(part, "note", f"not tried: {absent}")


def new_folder(runs: Path) -> Path:
    """Return the path of a new folder in `runs`, of this machine and moment. Raises UserError without a GPU."""
    if not torch.cuda.is_available():
        raise UserError("--gpu-smoke trains on a GPU, and torch finds none here; start it on a node that has one")
    return runs.absolute() / f"gpu_smoke_{socket.gethostname()}_{datetime.now():%Y-%m-%d_%H%M%S}"


def prepare(folder: Path, device: Device) -> None:
    """Write the models and the reward function that both parts use."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for seed, (name, sizes) in enumerate({"policy": _POLICY, "memory": _MEMORY}.items()):
        write_random_model(_QUICKSTART / "base", folder / name, sizes, dtype, seed)
    (folder / "rewards.py").write_text(_REWARD, encoding="utf-8")


class _Failed(Exception):
    """A part did not do what it must; its text is the outcome's."""


class _Absent(Exception):
    """A part is not installed on this machine."""


def _learner(folder: Path, device: Device) -> str:
    config = _config(folder, device, "learner")
    _train(folder, config, "steps=3")
    rows = _train(folder, config, "steps=5", "--resume")
    return _judged(folder, config, rows, steps=5)


def _engines(folder: Path, device: Device) -> str:
    # A third of the GPU is plenty for these models, and few rows need few graphs.
    flags = {"mem_fraction_static": 0.3, "max_running_requests": 64} if device == "cuda" else {}
    rollout = {"engine": "sglang", "engines": 1, "sglang": flags}
    sync = {"verify": True, **({"transport": "ipc"} if device == "cuda" else {})}
    placement = {"placement": "colocated"}
    config = _config(folder, device, "engines", rollout=rollout, sync=sync, cluster=placement)
    found = engine_python(config)
    if found.path == Path(sys.executable) and find_spec("sglang") is None:
        raise _Absent("no engines' Python was found; `make gpu` builds one, MEGASHARP_ENGINES_PYTHON names another")
    rows = _train(folder, config, "steps=3")
    text = _judged(folder, config, rows, steps=3)
    if device == "cuda":
        logs = sorted((folder / "runs" / config.name / "logs").rglob("engine*"))
        captured = any(_GRAPHS in path.read_text(errors="replace") for path in logs if path.is_file())
        text += "; CUDA graphs captured" if captured else "; no line of its log tells of captured CUDA graphs"
    return f"{text}; engines in {found.path} ({found.reason})"


def _config(folder: Path, device: Device, name: str, **sections: Mapping[str, object]) -> RunConfig:
    """Return the run's configuration, and write it as `folder`/NAME.yaml."""
    tree = {
        "name": name,
        "seed": 1,
        "steps": 3,
        "model": {"path": str(folder / "policy"), "dtype": "bfloat16" if device == "cuda" else "float32"},
        "policy": {
            "device": device, "micro_batch_tokens": 4096, "optimizer": {"lr": 1.0e-3},
            "offload": ["weights", "gradients", "optimizer"] if name == "engines" else [],
        },
        "data": {
            "task": "countdown", "path": str(_QUICKSTART / "data" / "train.jsonl"), "prompts_per_step": 16,
            "responses_per_prompt": 8, "max_prompt_tokens": 16, "max_response_tokens": 48,
        },
        "reward": {"function": f"{folder / 'rewards.py'}:digits"},
        "recipe": {"methods": ["grpo", "kl", "dlc"], "dlc": {"memory": {"path": str(folder / "memory")}}},
        "checkpoint": {"every": 3},
        "eval": {"every": 0, "at_start": False, "suites": []},
        # The libraries of tables may be missing here.
        "log": {"tensorboard": False, "rollouts": None},
        **sections,
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(dump_tree(tree), encoding="utf-8")
    return load_run(file)


def _train(folder: Path, config: RunConfig, *arguments: str) -> list[dict[str, float]]:
    """Run `megasharp train` to its end; return the rows of its steps. Raises _Failed."""
    log = folder / f"{config.name}.log"
    command = ["train", str(folder / f"{config.name}.yaml"), "--runs", str(folder / "runs"), *arguments]
    limit_s = _LIMITS_S[config.name] * (1 if config.policy.device == "cuda" else _LIMITS_OF_REHEARSAL)
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "megasharp.cli", *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
            preexec_fn=ended_with_parent(),  # noqa: PLW1509
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # With what it has started, which would keep the GPU.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-_OUTPUT_LINES:])
        how = f"not done in {limit_s:g} s" if code is None else f"exit {code}"
        raise _Failed(f"{how}; the end of {log}:\n{end}")
    file_of_rows = folder / "runs" / config.name / "metrics.jsonl"
    rows = [json.loads(line) for line in file_of_rows.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "policy/loss" in row]


def _judged(folder: Path, config: RunConfig, rows: Sequence[Mapping[str, float]], steps: int) -> str:
    """Return the run's figures in words. Raises _Failed where one cannot be right."""
    log = folder / f"{config.name}.log"
    if len(rows) != steps:
        raise _Failed(f"{len(rows)} steps instead of {steps}; see {log}")
    for name in ("policy/loss", "policy/grad_norm", "memory/cross_entropy", "memory/calibration_kl"):
        values = [row.get(name) for row in rows]
        if not all(value is not None and math.isfinite(value) for value in values):
            raise _Failed(f"{name} is not a finite number in every step; see {log}")
    if not all(row["policy/grad_norm"] > 0 and row["memory/calibration_kl"] > 0 for row in rows):
        raise _Failed(f"a network without a gradient, or a memory network that moves nothing; see {log}")
    gap = max(row["policy/engine_gap"] for row in rows)
    if not gap < _GAP:
        raise _Failed(f"the engine's log-probs are {gap:.3g} nats off the learner's, above {_GAP:g}; see {log}")
    rewards = " ".join(f"{row['reward/mean']:.2f}" for row in rows)
    return (
        f"{steps} steps, rewards {rewards}, engine gap at most {gap:.2g} nats, {rows[-1]['time/step']:.1f} s the last"
    )
