"""`megasharp plan` as a command: the real model beside it, and the whole plan as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import each_case
from typer.testing import CliRunner

from megasharp.cli.main import app
from megasharp.common.errors import RunFailed, UserError
from megasharp.common.layout import ParallelLayout
from megasharp.config.run_config import load_run
from megasharp.convert.hf_folder import read_config
from megasharp.planner.records import GPUS, Rates, Request, range_text
from megasharp.planner.suggest import make_plan, suggest
from megasharp.planner.text import plan_text, plan_tree, suggestions_text
from megasharp.trainer.plan import ModelCheck, Options, ask
from tests.unit.trainer.plans import EXAMPLES, REPOSITORY, asked, write_run


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def test_the_command_checks_the_real_model_and_prints_json(tmp_path: Path) -> None:
    """With Megatron's model in a process of its own; an error in the plan is exit code 1."""
    command = ["plan", str(write_run(tmp_path, "qwen3-32b")), "policy.pp=2", "--nodes", "4", "--gpu", "h100", "--json"]
    command += ["rollout.tp=1", "policy.lora={rank: 8, targets: [qkv]}", "--mfu", "0.3", "--disk", "5"]
    done = CliRunner().invoke(app, [*command, "--response", "3000"])
    tree = json.loads(done.stdout)
    adapters = 32 * 8 * (3 * 5120 + (8192 + 2 * 1024) // 8)
    assert [stage["trained_parameters"] for stage in tree["stages"]] == [adapters, adapters]
    assert [stage["parameters"] - adapters for stage in tree["stages"]] == [2_047_926_272, 2_047_931_392]
    assert not tree["works"] and done.exit_code == 1
    assert tree["problems"][0]["level"] == "error"
    assert tree["layout"] == {
        **dict.fromkeys(("dp", "pp"), 2),
        **dict.fromkeys(("vpp", "cp", "ep", "etp"), 1),
        "tp": 8,
        "ranks": 32,
        "micro_batch_tokens": 20480,
        "recompute": "none",
        "recompute_modules": ["mlp"],
        "optimizer_offload": False,
        "head": "logits",
        "offload": ["weights", "gradients", "optimizer"],
        "offloaded": ["weights", "gradients", "optimizer"],
    }
    assert tree["lora"] == {"rank": 8, "alpha": 16.0, "targets": ["qkv"]}
    assert tree["machines"] == {
        "nodes": 4,
        "gpus_per_node": 8,
        "gpus_in_use": 32,
        "gpu": "h100",
        "gpu_memory_bytes": 84_943_715_696,
    }
    assert tree["assumed"] == {
        "mfu_share": 0.3,
        "logp_mfu_share": 0.3,
        "engine_mfu_share": Rates().engine_mfu,
        "memory_bandwidth_share": Rates().bandwidth,
        "engine_layer_seconds": Rates().layer_s,
        "link_bandwidth_share": 0.8,
        "grouped_product_share": Rates().grouped,
        "sync_bytes_per_second": Rates().sync,
        "driver_seconds": Rates().driver_s,
        "disk_bytes_per_second": 5e9,
    }
    assert tree["batch"]["response_mean_tokens"] == 3000 and tree["batch"]["mini_batches"] == 1
    assert tree["engines"]["tp"] == 1


def test_a_model_that_megatron_cannot_build_is_told_in_its_words() -> None:
    arch = read_config(REPOSITORY / "configs/model/qwen3-8b")[2]
    with (
        ModelCheck() as check,
        pytest.raises(UserError, match=r"^Megatron cannot build this model in this layout: \S"),
    ):
        check.ask([arch], ParallelLayout(pp=5), None)
        check.counts()


def test_a_check_that_is_not_asked_ends_with_its_block() -> None:
    with ModelCheck() as check:
        process = check._process
    assert process.returncode == -9
    with ModelCheck() as check, pytest.raises(RunFailed, match="was ended by signal 9"):
        check._process.kill()
        check.ask([], ParallelLayout(), None)
        check.counts()


PLANNED = """
import sys
from pathlib import Path
from megasharp.trainer.plan import Options, ask
from megasharp.config.run_config import load_run
from megasharp.planner.suggest import make_plan
assert make_plan(ask(load_run(Path("examples/qwen3-32b-dlc/run.yaml")), "run.yaml", Options()).request).works
print(*{"megatron", "torch._dynamo", "torch._inductor", "sglang", "ray"}.intersection(sys.modules))
"""


def test_a_plan_imports_no_compiler_and_no_back_end() -> None:
    """They are most of what a plan would wait for."""
    done = subprocess.run([sys.executable, "-c", PLANNED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def leaves(tree: object) -> Iterator[Any]:
    if isinstance(tree, dict | list | tuple):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(one)
    else:
        yield tree


def shown(value: float) -> set[str]:
    """How a text may show a number: sizes in GB, MB or kB, shares in per cent, ranges by three digits; no sign."""
    value = abs(value)
    scaled = (value, value / 1e9, value / 1e6, value / 1e3, 100 * value)
    found = {f"{number:{form}}" for number in scaled for form in (",", ".0f", ",.0f", ".1f", ".2f", ".3f")}
    return found | {range_text((value, value))}


# Numbers of the words themselves: "16-bit" is said of weight_bits.
WORDS = {"1", "2", "5"}


@each_case("name", ["qwen2.5-32b-casp", "qwen3-32b-dlc", "qwen3-30b-a3b", "quickstart"])
def test_every_number_of_the_text_is_in_the_json(name: str) -> None:
    file = EXAMPLES / name / "run.yaml"
    overrides = {
        "qwen3-32b-dlc": ["policy.lora={rank: 16, alpha: 48, targets: [qkv]}", "policy.pp=4", "policy.dp=1"],
        "qwen3-30b-a3b": ["policy.experts={replay: true, balance_loss: 0.001}", "checkpoint.export_hf=true"],
    }
    question = ask(load_run(file, overrides.get(name, [])), str(file), Options())
    numbers_are_there(question.request, question.notes)


def numbers_are_there(request: Request, notes: tuple[str, ...]) -> None:
    plan = make_plan(request)
    found = suggest(request) if request.machines.gpu else []
    text = plan_text(request, plan, notes) + (suggestions_text(found, plan) if found else "")
    tree = json.loads(json.dumps(plan_tree(request, plan, notes, found), allow_nan=False))
    known = WORDS.union(*(shown(leaf) for leaf in leaves(tree) if isinstance(leaf, int | float)))
    words = " ".join(leaf for leaf in leaves(tree) if isinstance(leaf, str))
    known |= set(re.findall(r"\d[\d,.]*\d|\d", words))
    printed = set(re.findall(r"\d[\d,.]*\d|\d", text))
    assert len(printed) >= 20
    assert printed <= known, sorted(printed - known)


@each_case("response", [None, 3000, 8192])
def test_what_the_cache_holds_follows_from_what_is_printed(tmp_path: Path, response: int | None) -> None:
    """The mean size of a response in progress is the integral over what is printed of the lengths' spread."""
    question = asked(tmp_path, "qwen3-32b", options=Options(response=response))
    plan = make_plan(question.request)
    text = " ".join(plan_text(question.request, plan, ()).split())
    batch = json.loads(json.dumps(plan_tree(question.request, plan, (), ())))["batch"]
    spread = batch["response_spread_k"]
    # Of decoding's tokens, those at position t of a response are as many as responses are longer than t.
    positions = [n + 0.5 for n in range(8192)]
    going = [1 - (t / 8192) ** (1 / spread) if spread else 1.0 for t in positions]
    written = sum(t * there for t, there in zip(positions, going, strict=True)) / sum(going)
    size = batch["prompt_mean_tokens"] + written
    assert batch["response_in_progress_mean_tokens"] == pytest.approx(size, rel=1e-4)
    assert f"(on average {size:,.0f} tokens, prompt and what is written)" in text
    assert f"{int(1_353_383 / size)} responses in progress" in text
    of_spread = {None: "4096 on average (evenly spread up to 8192)", 8192: "8192 on average (all of 8192)"}
    tail = "3000 on average (<= 8192; a share (n / 8192)^(1 / 1.731) of them has at most n tokens)"
    assert f"responses of {of_spread.get(response, tail)} are assumed" in text


def test_packed_tokens_give_the_least_of_micro_batches(tmp_path: Path) -> None:
    question = asked(tmp_path, "qwen3-32b", "policy.pp=4", "policy.tp=4", "data.prompts_per_step=4")
    plan = make_plan(question.request)
    text = " ".join(plan_text(question.request, plan, ()).split())
    tree = plan_tree(question.request, plan, (), ())
    count = -(-plan.rows // 20480)
    assert f"at least {count} micro-batch(es) of <= 20,480 tokens" in text and '"micro_batches_least"' in json.dumps(
        tree
    )
    assert f"at least {count} micro-batch(es) a rank" in " ".join(problem.text for problem in plan.problems)


def test_engines_of_their_own_make_the_policy_leave_nothing_and_the_plan_says_so(tmp_path: Path) -> None:
    apart = ("cluster.placement=disaggregated", "cluster.nodes=2", "rollout.engines=2")
    told = "offload nothing (policy.offload: weights, gradients, optimizer is without effect, no engine shares"
    for overrides, offloaded in (((), ["weights", "gradients", "optimizer"]), (apart, [])):
        question = asked(tmp_path, "qwen3-32b", *overrides)
        plan = make_plan(question.request)
        tree = json.loads(json.dumps(plan_tree(question.request, plan, (), ())))
        assert tree["layout"]["offloaded"] == offloaded and (tree["host_bytes_per_node"] > 0) == bool(offloaded)
        assert (told in " ".join(plan_text(question.request, plan, ()).split())) != bool(offloaded)


UNFILLED = {
    "apart": ("qwen3-8b+qwen3-1.7b", 1, "cluster.placement=disaggregated", "policy.tp=8"),
    "colocated": ("qwen3-14b", 3, "policy.pp=2", "policy.tp=8"),
}


@each_case("placement", UNFILLED)
def test_layouts_are_suggested_where_the_files_own_does_not_fill_the_nodes(tmp_path: Path, placement: str) -> None:
    """What is planned then is the first of them, with the reason as an error: exit code 1."""
    piece, nodes, *overrides = UNFILLED[placement]
    command = ["plan", str(write_run(tmp_path, piece)), *overrides, "--nodes", str(nodes)]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, UserError)
    done = CliRunner().invoke(app, [*command, "--suggest", "--json"])
    tree = json.loads(done.stdout)
    assert done.exit_code == 1 and not tree["works"]
    error, *others = tree["problems"]
    assert f"{8 * nodes} GPUs cannot be filled with policy.tp x pp x cp" in error["text"]
    assert error["text"].endswith("; planned is the first of the layouts that --suggest found")
    assert all(problem["level"] == "warning" for problem in others)
    keys = [one["keys"] for one in tree["suggestions"]]
    assert tree["layout"]["tp"] == keys[0]["policy.tp"] and tree["engines"]["tp"] == keys[0]["rollout.tp"]
    for one in keys:
        ranks = one["policy.dp"] * one["policy.tp"] * one["policy.pp"] * one["policy.cp"]
        sampling = one["rollout.engines"] * one["rollout.tp"]
        assert (ranks, sampling) == (24, 24) if placement == "colocated" else ranks + sampling == 8
    asked(tmp_path, piece, *overrides, *(f"{key}={json.dumps(value)}" for key, value in keys[0].items()))


@each_case(
    ("overrides", "gpu", "text"),
    [
        ((), "h100", None),
        ((), "h200", "fitted to published runs on H100s"),
        ((), "81559", "this GPU is taken for an H200"),
        ((), "b200", "two published steps on GB200"),
        (("policy.tp=4", "policy.cp=2"), "h100", "policy.cp=2: no run with context parallelism"),
        (("policy.attention=te",), "h100", "policy.attention=te: activations are counted as with fa2"),
    ],
)
def test_a_plan_notes_what_no_published_run_covers(
    tmp_path: Path, overrides: tuple[str, ...], gpu: str, text: str | None
) -> None:
    request = asked(tmp_path, "qwen3-32b", *overrides, options=Options(gpu=gpu)).request
    plan = make_plan(request)
    notes = json.loads(json.dumps(plan_tree(request, plan, (), ())))["notes"]
    assert len(notes) == (text is not None) and all(text in note for note in notes)
    assert text is None or text in " ".join(plan_text(request, plan, ()).split())
    assert plan.step_range is not None
    low, high = plan.step_range
    assert (high > 2 * low) == ("policy.cp=2" in overrides)


def test_a_suggestions_json_sets_its_keys_and_has_its_seconds(tmp_path: Path) -> None:
    request = asked(tmp_path, "qwen3-32b", options=Options(nodes=2)).request
    found = suggest(request)
    (first, *_) = json.loads(json.dumps(plan_tree(request, make_plan(request), (), found)))["suggestions"]
    assert first["step_seconds"] == found[0].plan.step_seconds
    for one in (first, *first["alternatives"]):
        assert one["step_seconds_low"] < one["step_seconds"] < one["step_seconds_high"]
    assert first["keys"]["policy.offload"] == ["weights", "gradients", "optimizer"]
    spare = GPUS["h200"].memory - first["fullest_bytes"]
    assert f"{spare / 1e9:.0f} GB of each GPU to spare" in first["reasons"][2]
