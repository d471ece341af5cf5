"""The engines' Python of a node: its packages, its GPUs, and whether it would start an engine as the run asks.

It is asked in a process of its own, with the environment of an engine, also where no model is at hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megasharp.cluster.slurm.doctor.findings import Engines, Finding
from megasharp.cluster.slurm.doctor.gpu_state import driver
from megasharp.cluster.slurm.gpus import Node
from megasharp.common.errors import UserError
from megasharp.rollout.sglang.client.health import check_engines, run_python
from megasharp.rollout.sglang.client.launch import how_to_build

_ERROR = "error: "
# Runs in the engines' Python. Libraries with kernels are imported, because one for another CUDA shows only then.
_CARD = """
import importlib, importlib.metadata, json, os, shutil, sys
from megasharp.common.errors import UserError
from megasharp.rollout.sglang.engine.check import check_build, check_installed
device = sys.argv[1]
try:
    check_installed(device)
    check_build(device)
except UserError as error:
    sys.exit(f"error: {error}")
import torch
card = {"sglang": importlib.metadata.version("sglang"), "torch": torch.__version__, "cuda": torch.version.cuda}
if device == "cuda":
    card["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    files = importlib.metadata.files("sglang-kernel") or ()
    for name in sorted({file.parts[0] for file in files if file.name == "__init__.py" and len(file.parts) == 2}):
        importlib.import_module(name)
    # In the order in which SGLang and tvm-ffi look.
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = {"ninja": ["ninja"], "nvcc": [home + "/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]}
    card["lacks"] = [name for name, paths in places.items() if not any(map(shutil.which, paths))]
print(json.dumps({**card, "gpus": torch.cuda.device_count()}))
"""


@dataclass(frozen=True, slots=True)
class Card:
    """The engines' Python in its own words. `cuda`: of its torch, None for CPUs alone; `nccl` is known on GPUs.

    `lacks` are programs that engines on GPUs compile kernels with and that are not found.
    """

    sglang: str
    torch: str
    cuda: str | None
    gpus: int
    nccl: str | None = None
    lacks: Sequence[str] = ()


def check_engines_python(engines: Engines, node: Node | str, gpus: int) -> Iterator[Finding | Card]:
    """Yield its findings, and its card where it has one; `gpus` is how many of the node's the run wants."""
    card = read_card(engines)
    if isinstance(card, str):
        yield not_usable(engines, card)
        return
    yield card
    yield usable(engines, card, gpus)
    if not isinstance(node, str) and engines.settings.device == "cuda":
        yield driver(node, card.cuda, "the engines' torch")
    if not engines.at_hand:
        yield Finding("note", "engines", "the model is not at hand here: rollout.sglang was not compared with it")
        return
    try:
        check_engines(engines.settings, engines.where)
    except UserError as error:
        yield Finding("FAIL", "engines", str(error))
    else:
        yield Finding("ok", "engines", "an engine of this run would start with its keys and model")


def read_card(engines: Engines) -> Card | str:
    """Ask the engines' Python for its card; a line that says why it has none."""
    settings = engines.settings
    try:
        ended = run_python(settings, ["-c", _CARD, settings.device])
    except UserError as error:
        return str(error)
    if ended.returncode == 0:
        return Card(**json.loads(ended.stdout.splitlines()[-1]))
    last = " ".join(ended.stderr.strip().splitlines()[-1:]) or f"exit code {ended.returncode}"
    return last.removeprefix(_ERROR)


def not_usable(engines: Engines, reason: str) -> Finding:
    """Report an engines' Python that cannot be used, with its own reason."""
    settings, text = engines.settings, reason
    if str(settings.python) not in text:
        text = f"rollout.python: {settings.python}: {text}"
    if "build" not in text:
        text = f"{text}; a Python with SGLang and megasharp is built {how_to_build(settings.device)}"
    return Finding("FAIL", "engines' Python", text)


def usable(engines: Engines, card: Card, gpus: int) -> Finding:
    """Compare the GPUs that the engines' torch finds with those that the run wants of this node."""
    python = engines.settings.python
    text = f"{python}: sglang {card.sglang}, torch {card.torch}"
    if engines.settings.device == "cuda" and card.gpus < gpus:
        remedy = "set CUDA_VISIBLE_DEVICES right, or build it anew for this driver"
        return Finding("FAIL", "engines' Python", f"{text}, which finds {card.gpus} of {gpus} GPU(s); {remedy}")
    if card.lacks:
        how = {"ninja": "install it beside this Python", "nvcc": "load CUDA's module, or set CUDA_HOME"}
        remedy = ", ".join(f"{name} ({how[name]})" for name in card.lacks)
        return Finding("warn", "engines' Python", f"{text}; SGLang compiles kernels when it starts and lacks {remedy}")
    return Finding("ok", "engines' Python", text)
