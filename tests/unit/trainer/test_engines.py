"""Which keys go together where engines are concerned, and what engines are started with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.core import apply_overrides, parse_yaml, validate
from megasharp.config.run_config import RunConfig
from megasharp.convert.model_folder import ModelFolder
from megasharp.trainer.resolve.engine_python import ENGINES_PYTHON, engine_python
from megasharp.trainer.resolve.engine_settings import (
    check_context,
    check_engine_keys,
    check_room,
    check_window,
    choose_transport,
    cluster_layout,
    fleet_settings,
    longest,
)

MINIMAL = """
name: minimal
steps: 3
model: {path: some/folder, dtype: float32}
data: {task: countdown, path: train.jsonl, max_prompt_tokens: 64, max_response_tokens: 32}
"""
FLEET = "rollout.engine=sglang"
APART = "cluster.placement=disaggregated"
HERE = "rollout.external=[http://127.0.0.1:30000]"
THERE = "rollout.external=[http://10.0.0.5:30000]"
GPUS = "cluster.gpus_per_node=8"
TWO_NODES = ("cluster.backend=ray", "cluster.nodes=2")


def config(*overrides: str) -> RunConfig:
    return validate(RunConfig, apply_overrides(parse_yaml(MINIMAL, "minimal"), overrides), "minimal")


@each_case(
    ("overrides", "transport"),
    [
        ([], "inprocess"),
        ([FLEET], "shared_memory"),
        ([FLEET, APART], "gloo"),
        ([FLEET, GPUS], "ipc"),
        ([FLEET, APART, GPUS], "nccl"),
        ([FLEET, "cluster.backend=ray", "cluster.nodes=2"], "gloo"),
        ([FLEET, GPUS, *TWO_NODES, "policy.dp=16", "rollout.engines=16"], "ipc"),
        ([FLEET, GPUS, *TWO_NODES, "policy.tp=8", "policy.dp=2", "rollout.tp=4", "rollout.engines=3"], "ipc"),
        # An engine on a GPU without a rank of the policy.
        ([FLEET, GPUS, *TWO_NODES, "policy.dp=8", "rollout.engines=16"], "disk"),
        ([FLEET, GPUS, "policy.dp=2", "rollout.engines=3"], "shared_memory"),
        ([FLEET, "sync.transport=ipc", "rollout.engines=3"], "ipc"),
        ([FLEET, "sync.transport=disk"], "disk"),
        ([FLEET, "sync.transport=gloo"], "gloo"),
        ([FLEET, APART, "sync.transport=shared_memory"], "shared_memory"),
        ([FLEET, APART, HERE, "sync.transport=shared_memory"], "shared_memory"),
        ([FLEET, APART, HERE, "rollout.engines=0"], "gloo"),
        ([FLEET, APART, THERE], "disk"),
        ([FLEET, APART, THERE, "cluster.backend=ray"], "gloo"),
        ([FLEET, APART, GPUS, THERE, "cluster.backend=ray"], "nccl"),
    ],
)
def test_how_weights_travel(overrides: list[str], transport: str) -> None:
    assert choose_transport(config(*overrides), "run.yaml") == transport


@each_case(
    "overrides",
    [
        ["sync.transport=gloo"],
        [FLEET, "sync.transport=inprocess"],
        [FLEET, GPUS, "rollout.engines=2", "sync.transport=ipc"],
        [FLEET, *TWO_NODES, "rollout.engines=2", "sync.transport=ipc"],
        [FLEET, "sync.transport=nccl"],
        [FLEET, GPUS, "sync.transport=nccl"],
        [FLEET, APART, GPUS, "sync.transport=ipc"],
        [FLEET, "cluster.nodes=2", "sync.transport=shared_memory"],
        [FLEET, APART, THERE, "cluster.backend=ray", "sync.transport=shared_memory"],
        [FLEET, APART, THERE, "sync.transport=gloo"],
        [FLEET, APART, GPUS, HERE, "sync.transport=ipc"],
    ],
)
def test_ways_that_do_not_lead_there(overrides: list[str]) -> None:
    with pytest.raises(UserError, match=r"run\.yaml: sync\.transport=") as raised:
        choose_transport(config(*overrides), "run.yaml")
    assert "\n" not in str(raised.value)


@each_case(
    "override",
    [
        "rollout.python=/opt/python",
        "rollout.engines=2",
        "rollout.external=[http://127.0.0.1:1]",
        "rollout.tp=2",
        "rollout.sglang={page_size: 16}",
        "rollout.overlap_annotation=true",
        "sync.verify=true",
        "sync.in_flight=in_place",
        "sync.bucket_mb=3",
        "sync.limit_s=3",
        APART,
        "policy.offload=[weights]",
    ],
)
def test_what_only_engines_of_their_own_can_follow(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=f"{key} is for engines of their own"):
        check_engine_keys(config(override), "run.yaml")
    apart = [APART] if key in ("rollout.external", "rollout.overlap_annotation") else []
    check_engine_keys(config(override, FLEET, *apart), "run.yaml")


def test_a_policy_that_sleeps_annotates_nothing() -> None:
    with pytest.raises(UserError, match=r"rollout\.overlap_annotation .* co-located engines") as raised:
        check_engine_keys(config(FLEET, "rollout.overlap_annotation=true"), "run.yaml")
    assert "\n" not in str(raised.value)


def test_engines_that_sleep_keep_no_stragglers() -> None:
    keep = [FLEET, "rollout.stragglers=keep", "rollout.max_staleness=1"]
    with pytest.raises(UserError, match="co-located engines sleep"):
        check_engine_keys(config(*keep), "run.yaml")
    check_engine_keys(config(*keep, APART), "run.yaml")


@each_case(
    ("overrides", "words"),
    [
        ([HERE], r"have devices of their own and never sleep; set cluster\.placement=disaggregated"),
        (["rollout.engines=0"], r"leaves no engine to sample; start one, or name rollout\.external"),
        ([APART, "rollout.external=[10.0.0.5]"], "10.0.0.5 is no address of an engine; write http://host:port"),
        ([APART, "rollout.external=[http://a:1,http://b:1,http://a:1/]"], "names http://a:1 twice"),
    ],
)
def test_engines_started_by_hand_that_a_run_cannot_join(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=rf"rollout\.(external|engines).*{words}"):
        check_engine_keys(config(FLEET, *overrides), "run.yaml")


def test_other_nodes_need_ray() -> None:
    with pytest.raises(UserError, match=r"cluster\.nodes=2 needs cluster\.backend=ray"):
        check_engine_keys(config(FLEET, "cluster.nodes=2"), "run.yaml")


@each_case(
    ("overrides", "positions", "words"),
    [
        ([], 101, r"= 96, but the number of positions of some/folder is 101, of which SGLang keeps 6 .* to 95 in all"),
        (["rollout.sglang={context_length: 101}"], 500, r"= 96, but rollout\.sglang\.context_length is 101"),
        (["rollout.sglang={max_total_tokens: 80}"], 500, r"max_total_tokens is 80, .* lower the lengths to 74 in all"),
    ],
)
def test_lengths_that_engines_have_no_room_for(overrides: list[str], positions: int, words: str) -> None:
    with pytest.raises(UserError, match=rf"run\.yaml: data\.max_prompt_tokens \+ data\.max_response_tokens .*{words}"):
        check_context(config(*overrides), positions, "run.yaml")
    check_context(config(*overrides, "data.max_response_tokens=2"), positions, "run.yaml")


def test_lengths_beyond_a_window_that_engines_would_ignore() -> None:
    check_window(config(), None, "run.yaml")
    check_window(config(), 96, "run.yaml")
    with pytest.raises(UserError, match=r"run\.yaml: .* = 96, but some layers see a window of 95 positions"):
        check_window(config(), 95, "run.yaml")


def test_lengths_that_running_engines_have_no_room_for() -> None:
    check_room(config(), 96)
    with pytest.raises(UserError, match=r"= 96, but the engines have room for 95 tokens; .* raise max_total_tokens"):
        check_room(config(), 95)


def test_room_is_for_the_longest_responses_of_any_stage_and_of_evaluations() -> None:
    """64 tokens of a prompt, and what is largest: the last stage's limit, an earlier one's, or the evaluations'."""
    stages = "data.stages=[{until: 5, max_response_tokens: 40}, {until: 9, max_response_tokens: 48}]"
    assert longest(config()) == 64 + 32
    assert longest(config(stages)) == 64 + 48
    assert longest(config(stages, "eval.max_response_tokens=50")) == 64 + 50
    assert longest(config(stages, "eval.max_response_tokens=20")) == 64 + 48
    with pytest.raises(UserError, match=r"^data.max_prompt_tokens \+ data.stages\[1\].max_response_tokens = 112, but"):
        check_room(config(stages), 100)


def test_slots() -> None:
    shared = cluster_layout(config(FLEET, "policy.tp=2", "rollout.engines=2"))
    assert (len(shared.slots), shared.world, shared.engines) == (2, 2, 2)
    apart = cluster_layout(config(FLEET, APART, "policy.tp=2", "rollout.engines=2", "cluster.cpus_per_slot=0.5"))
    assert (len(apart.slots), apart.bundle) == (4, {"CPU": 0.5})
    assert cluster_layout(config("policy.dp=3")).engines == 0


def test_what_engines_are_started_with(tmp_path: Path) -> None:
    run = config(FLEET, "rollout.tp=2", "rollout.engines=3", "rollout.sglang={page_size: 16}", "deterministic=true")
    model = ModelFolder(tmp_path, is_megatron=False)
    settings = fleet_settings(run, model, None, tmp_path / "logs")
    assert settings.rollout == run.rollout
    assert (settings.device, settings.dtype) == ("cpu", "float32")
    assert settings.deterministic and settings.sleep
    apart = fleet_settings(config(FLEET, APART, "policy.experts.replay=true"), model, None, tmp_path)
    assert not apart.sleep and apart.returns_experts and not settings.returns_experts


def test_engines_beside_a_cold_memory_network_start_without_its_weights(tmp_path: Path) -> None:
    """Its folder may have none, and the first push brings them."""
    model = ModelFolder(tmp_path, is_megatron=False)
    for files, expected in (([], "dummy"), (["model.safetensors"], None)):
        for name in files:
            (tmp_path / name).touch()
        assert fleet_settings(config(FLEET), model, model, tmp_path).rollout.sglang.get("load_format") == expected


def test_the_engines_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is there comes before the ones below it; an environment for the run's device before the other's."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "beside" / ".venv-gpu"))
    monkeypatch.delenv(ENGINES_PYTHON, raising=False)

    def built(folder: str) -> Path:
        python = tmp_path / folder / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        return python

    def chosen(*overrides: str) -> tuple[Path, str]:
        found = engine_python(config(FLEET, *overrides))
        return found.path, found.reason

    assert chosen() == (Path(sys.executable), "the trainer's own, as no other was found")
    for_gpus = built("beside/.venv-engines")
    assert chosen() == (for_gpus, f".venv-engines in {tmp_path}/beside")
    for_cpus = built("here/.venv-fleet")
    assert chosen()[0] == for_cpus
    assert chosen(GPUS)[0] == for_gpus
    nearer = built("here/.venv-engines")
    assert chosen(GPUS)[0] == nearer
    named = built("image")
    monkeypatch.setenv(ENGINES_PYTHON, str(named))
    assert chosen(GPUS) == (named, "the variable MEGASHARP_ENGINES_PYTHON")
    assert chosen("rollout.python=own/python") == (Path("own/python"), "rollout.python")
    monkeypatch.setenv(ENGINES_PYTHON, "/no/python")
    with pytest.raises(UserError, match=r"^MEGASHARP_ENGINES_PYTHON=/no/python does not exist; .* rollout\.python$"):
        chosen()
