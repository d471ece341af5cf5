"""The benchmarks run where there is no GPU, and say of what needs one that it was not measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from waiting import HANG_S

from megasharp.algos.build_recipe import build_recipe
from megasharp.config.policy import HeadForm
from megasharp.convert.hf_folder import read_config
from megasharp.learner import cpu_backend
from megasharp.learner.learner import POLICY
from megasharp.learner.ranks.all_ranks import OneRank, RanksLearner
from megasharp.planner import formulas

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))

import bench_step  # noqa: E402

pytestmark = pytest.mark.long("examples")

SMALL_STEP = "--model quickstart --dtype float32 --tokens 256 --prompt 8 --response 24 --steps 2 --annotate"
DRAWN_STEP = (
    "--model qwen3-1.7b --random-init --layers 1 --tokens 32 --prompt 8 --response 24 --micro-batches 1 --steps 1 "
    "--optimizer-offload --recompute selective --recompute-modules mlp"
)


def run(results: Path, tool: str, arguments: str) -> dict[str, float | None]:
    """The figures by name."""
    command = [sys.executable, f"tools/{tool}.py", *arguments.split()]
    environment = {**os.environ, "BENCH_RESULTS": str(results), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = results.glob(f"{tool}-*.json")
    record = json.loads(path.read_text())
    assert record["benchmark"] == tool and record["versions"]["torch"]
    return {figure["name"]: figure["value"] for figure in record["figures"]}


@pytest.mark.parametrize("arguments", [SMALL_STEP, DRAWN_STEP], ids=["read", "drawn"])
def test_a_steps_stages_add_up(tmp_path: Path, arguments: str) -> None:
    found = run(tmp_path, "bench_step", arguments)
    parts = [found[name] or 0.0 for name in ("forward", "backward", "gradient_sync", "optimizer")]
    assert 0 < sum(parts) < (found["update"] or 0.0) < (found["step"] or 0.0)
    assert found["MFU"] is None and found["peak memory"] is None
    assert ("annotate" in found) == ("--annotate" in arguments)


def of_sum(own: torch.Size, a: torch.Size, b: torch.Size, *scales: object, out_shape: torch.Size) -> int:
    """Of a product that is added where it goes, which the counter leaves out."""
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.parametrize("head", ["logits", "chunked"])
def test_flops_are_those_of_torchs_counter(monkeypatch: pytest.MonkeyPatch, head: HeadForm) -> None:
    """All matrix products, attention aside, of rows without filling; the formula has the norms' weights, 0.3 % here."""
    # Products that the counter does not know.
    monkeypatch.setattr(cpu_backend, "product", lambda *_: None)
    words = "bench_step --model quickstart --dtype float32 --tokens 516 --prompt 65 --response 64 --micro-batches 1"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--head", head])
    setting = bench_step.arguments()
    folder = bench_step.saved(setting.model)
    architecture = read_config(folder)[2]
    recipe = build_recipe(("grpo",), {}, reduction=None, constant=1.0, mini_batches=1)
    batch = bench_step.random_batch(setting, architecture, setting.layout(1))
    settings = {POLICY: bench_step.learner_settings(setting, folder, 1, recipe)}
    with (
        closing(RanksLearner(OneRank(settings, torch.device("cpu")))) as learner,
        FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: of_sum}) as work,
    ):
        learner.step(batch, recipe)
    (micro,) = batch.mini_batches[0].per_rank[0]
    rows = micro.rows_T.numel()
    again = 2 * rows * architecture.vocab * architecture.hidden if head == "chunked" else 0
    counted = sum(work.flop_counts["Global"][product] for product in (torch.ops.aten.mm, torch.ops.aten.addmm_)) - again
    monkeypatch.setattr(formulas, "_attention_flops", lambda _: 0.0)
    assert bench_step.model_flops(architecture, batch, head) == pytest.approx(counted, rel=3e-3)


def test_flops_of_a_window_are_those_of_what_is_seen() -> None:
    """The rows of a prompt of ten tokens and of its response's first 31."""
    setting = bench_step.Setting(**dict.fromkeys(bench_step.Setting.__slots__))  # type: ignore[arg-type]
    setting = replace(setting, tokens=64, prompt=10, response=32, micro_batches=1, tp=1, pp=1, cp=1)
    architecture = read_config(REPOSITORY / "configs" / "model" / "qwen3-1.7b")[2]
    near = replace(architecture, windows=(8,) * architecture.num_layers)
    batch = bench_step.random_batch(setting, architecture, setting.layout(1))
    whole, seen = (bench_step.model_flops(each, batch, "logits") for each in (architecture, near))
    positions = sum(range(1, 42)), sum(min(row, 8) for row in range(1, 42))
    per_position = 3 * 4 * architecture.query_size * architecture.num_layers
    assert whole - seen == pytest.approx((positions[0] - positions[1]) * per_position)


def test_the_bar_is_for_one_step_and_each_variant_has_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(words: str) -> bench_step.Setting:
        monkeypatch.setattr(sys, "argv", ["bench_step", "--random-init", *words.split()])
        return bench_step.arguments()

    plain, h200 = asked(""), "NVIDIA H200"
    assert bench_step.why_no_bar(plain, h200) == "" == bench_step.why_no_bar(asked("--recompute selective"), h200)
    assert bench_step.why_no_bar(plain, "NVIDIA H100 80GB HBM3") == "the bar is for an H200"
    others = ("--fp8 hybrid", "--layers 2", "--model qwen3-8b", "--tokens 4096", "--optimizer-offload")
    assert {bench_step.why_no_bar(asked(words), h200) for words in others} == {"the bar is for another step"}
    more = (
        "--recompute selective",
        "--recompute full --head chunked",
        "--overlap true",
        "--tp 2",
        "--layers 3",
        *others,
    )
    found = [
        tuple(bench_step.variant(asked(words), 1)) for words in more if "--model" not in words and "4096" not in words
    ]
    assert len(set(found)) == len(found) and () not in found and bench_step.variant(plain, 1) == []


def test_whose_peak_is_known() -> None:
    names = (
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
        "NVIDIA H100 PCIe",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    )
    sheets = [bench_step.data_sheet(name) for name in names]
    assert [sheet and sheet.name for sheet in sheets] == ["h100", "h200", None, None, None, None]


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("bench_step", "--model nope", "bench_step: --model nope is no folder with config.json"),
        ("bench_step", "--model qwen3-9b --random-init", "bench_step: --model qwen3-9b is no folder"),
        ("bench_step", "--model quickstart --tp 2", "--tp x --pp x --cp = 2 does not divide 1 process(es)"),
        ("bench_step", "--steps 0", "--steps is too small"),
        ("bench_step", "--model quickstart --layers 1", "--layers is for --random-init"),
        ("bench_step", "--tokens 256", "--tokens 256 holds no --prompt 256 with --response 1792"),
        ("bench_step", "--megatron [1]", "invalid keys value: '[1]'"),
        ("bench_sync", "--dtype int8", "invalid choice: 'int8'"),
        ("bench_sync", "--model qwen3-9b", "bench_sync: --model qwen3-9b is no folder"),
    ],
)
def test_mistakes_are_told_in_a_line(tool: str, arguments: str, told: str) -> None:
    command = [sys.executable, f"tools/{tool}.py", *arguments.split()]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode != 0 and told in done.stderr.splitlines()[-1]


def test_weights_reach_another_process(tmp_path: Path) -> None:
    found = run(tmp_path, "bench_sync", "--model quickstart --repeats 2")
    for name in ("buckets", "lent, later", "lent, first", "lent, moved", "lent, with verify", "broadcast by gloo"):
        assert (found[name] or 0) > 0, name


def test_slopes(tmp_path: Path) -> None:
    found = run(tmp_path, "bench_scaling", "--lengths 8 32 --counts 4 16 --repeats 1")
    assert 0.4 < (found["slope of FLOPs with length"] or 0) < 1.2
    assert found["slope of FLOPs with count"] == pytest.approx(1)
    assert {"slope of sampling with length", "slope of update with count"} <= found.keys()


def test_rows_are_refilled(tmp_path: Path) -> None:
    found = run(tmp_path, "bench_sampling", "--median 4 --rounds 1")
    assert {"uneven, ratio", "even, ratio"} <= found.keys()


def test_without_a_gpu_the_whole_check_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    done = subprocess.run(
        [sys.executable, "tools/check_gpu.py"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr == "check_gpu: torch finds no GPU on this machine\n"


def test_rollouts_are_simulated(tmp_path: Path) -> None:
    """Enough steps for a mean; a quarter of them is left out of it, not fifty."""
    settings = "--settings 0.5/0/abort 0.5/1/abort 0.5/2/keep --steps 120 --json"
    found = run(tmp_path, "simulate_rollouts", settings)
    for setting in ("0.5/1/abort", "0.5/2/keep"):
        assert found[f"{setting}: mean length, difference"] == found[f"{setting}: lost, twice, changed"] == 0
        assert (found[f"{setting}: steps/h"] or 0.0) > 1.2
    assert (found["0.5/0/abort: mean length, difference"] or 0.0) > 5
