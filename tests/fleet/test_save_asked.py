"""SIGUSR1 while engines that share the learner's devices are busy with responses longer than a flush would wait for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from waiting import HANG_S

from megasharp.checkpoint.rollout_store import read_unfinished
from megasharp.rollout.sglang.client.api import _FLUSH_S

pytestmark = pytest.mark.long("fleet-runs")

REPOSITORY = Path(__file__).parents[2]
# A token takes some milliseconds on a CPU.
LONG = 8000
OPTIONS = (
    "steps=3",
    "cluster.backend=local",
    "rollout.engines=1",
    "policy.tp=1",
    "recipe.methods=[grpo]",
    "log.tensorboard=false",
    "data.prompts_per_step=2",
    "data.responses_per_prompt=2",
    "policy.micro_batch_tokens=20000",
    "eval={suites: [], with_memory: false}",
    "data.stages=[{until: 1, max_response_tokens: 8}]",
    f"data.max_response_tokens={LONG}",
)


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """The quickstart's model with room for long responses, none of which it ends."""
    folder = Path(shutil.copytree(REPOSITORY / "examples/quickstart/base", tmp_path / "endless"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2 * LONG}))
    weights = load_file(folder / "model.safetensors")
    head, end = weights["lm_head.weight"], config["eos_token_id"]
    # The logit of the token that ends a response is the mean of all, which the largest exceeds; then both are scaled.
    head -= head.mean(dim=0)
    head[end] = 0.0
    head *= 100.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def asked(folder: Path, model: Path, *options: str) -> tuple[str, float]:
    """A run that is asked to save some seconds after its first step: what it printed, and how long it took to end."""
    example = ["train", "examples/fleet_on_cpu/run.yaml", "--runs", str(folder), f"model.path={model}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "megasharp.cli", *example, *OPTIONS, *options], cwd=REPOSITORY, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )  # fmt: skip
    rows = folder / "fleet_on_cpu" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + HANG_S
        while not rows.exists() or not rows.read_text():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.1)
        time.sleep(5)
        began = time.monotonic()
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=HANG_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75, output
    assert "SIGUSR1: saved after step 1; continue with --resume" in output
    assert "is lost" not in output
    return output, time.monotonic() - began


def test_what_is_in_flight_is_ended_and_the_run_saves(tmp_path: Path, endless: Path) -> None:
    _, seconds = asked(tmp_path, endless, "eval={suites: [], with_memory: false}")
    assert seconds < _FLUSH_S + 20, "the flush must have waited"
    prompts = read_unfinished(tmp_path / "fleet_on_cpu/checkpoints/step_000001")
    assert [prompt.open for prompt in prompts] == [(0, 1)] * 2
    lengths = [r.tokens.numel() for prompt in prompts for r in prompt.responses if r is not None]
    assert len(lengths) == 4 and min(lengths) > 0 and max(lengths) < LONG


def test_an_evaluation_is_ended_and_is_done_again(tmp_path: Path, endless: Path) -> None:
    """It has no part that a resumed run could use."""
    evaluation = f"suites: [countdown_dev], every: 1, n: 2, k: [1], max_response_tokens: {LONG}, with_memory: false"
    output, seconds = asked(tmp_path, endless, f"eval={{{evaluation}, at_start: false}}")
    assert seconds < _FLUSH_S + 20, "the flush must have waited"
    assert "pass@1" not in output
    run = tmp_path / "fleet_on_cpu"
    assert read_unfinished(run / "checkpoints/step_000001") == () and not [*run.glob("evals/*/*")]
