"""How far engine and learner are apart in a mixture of experts, with and without routing replay.

    python tools/measure_routing_replay.py                  # the engine in the trainer's process
    python tools/measure_routing_replay.py --engine sglang  # needs `make fleet`

Trains two random Qwen3-MoE models for three steps each way, in bfloat16, in which sums of another order choose other
experts: one as `write_random_model` draws it, and one that is sharp, with matrices twice as large. The engine in the
process samples in float32, SGLang's in bfloat16. Figures are means over the steps, of the runs' own metrics:
`policy/engine_gap`, its largest token, and `experts/moved`, which a run with replay alone has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import torch
from results import Figure, report
from safetensors.torch import load_file, save_file

from megasharp.convert.random_model import write_random_model

REPOSITORY = Path(__file__).resolve().parents[1]
QUICKSTART = REPOSITORY / "examples" / "quickstart"
SIZES: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
}
STEPS = 3


def main() -> None:
    """Make the models, train, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("inprocess", "sglang"), default="inprocess")
    engine = parser.parse_args().engine
    figures = []
    with tempfile.TemporaryDirectory() as name:
        for model, gain in (("random", 1.0), ("sharp", 2.0)):
            folder = make(Path(name) / model, gain)
            for replay in (False, True):
                rows = train(folder, engine, replay, Path(name) / "runs")
                figures += figures_of(f"{model}, {'with' if replay else 'without'} replay", rows)
    report(f"routing_replay-{engine}", figures, settings={"steps": STEPS, "dtype": "bfloat16", **numbers()})


def make(folder: Path, gain: float) -> Path:
    """A model whose matrices are `gain` times as large as a random one's."""
    write_random_model(QUICKSTART / "base", folder, SIZES, torch.float32, seed=0)
    tensors = load_file(folder / "model.safetensors")
    scaled = {name: tensor * gain if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def train(model: Path, engine: str, replay: bool, runs: Path) -> list[dict[str, float]]:
    """Train for a few steps; returns their metrics."""
    name = f"{model.name}-{replay}"
    keys = [f"name={name}", f"steps={STEPS}", f"model.path={model}", "model.dtype=bfloat16", f"rollout.engine={engine}"]
    keys += [f"policy.experts.replay={str(replay).lower()}", "policy.dp=1", "eval.suites=[]", "eval.every=0"]
    command = [sys.executable, "-m", "megasharp.cli", "train", str(QUICKSTART / "run.yaml"), "--runs", str(runs), *keys]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "policy/engine_gap" in row]


def figures_of(what: str, rows: list[dict[str, float]]) -> list[Figure]:
    """The table's rows of one run."""
    gap, largest = (fmean(row[f"policy/engine_gap{end}"] for row in rows) for end in ("", "_max"))
    found = [Figure(f"{what}: gap", gap, "nats"), Figure(f"{what}: largest gap of a token", largest, "nats")]
    if "experts/moved" in rows[0]:
        moved = 100 * fmean(row["experts/moved"] for row in rows)
        found.append(Figure(f"{what}: other experts", moved, "% of tokens and layers"))
    return found


def numbers() -> dict[str, int]:
    """The sizes that the figures depend on."""
    return {name: value for name, value in SIZES.items() if isinstance(value, int) and not isinstance(value, bool)}


if __name__ == "__main__":
    main()
