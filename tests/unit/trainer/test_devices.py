"""Which GPUs of a machine a run without Ray takes, by what CUDA was told of them, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.core import apply_overrides, parse_yaml, validate
from megasharp.config.run_config import RunConfig
from megasharp.trainer import early_ranks
from megasharp.trainer.eval_source import evaluation_settings
from megasharp.trainer.placement import check_placement
from megasharp.trainer.resolve.devices import check_enough, check_names, gpus_here, leave_gpus_alone

MINIMAL = """
name: minimal
steps: 3
model: {path: some/folder}
data: {task: countdown, path: train.jsonl}
"""
SLICE = "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"
FLEET = "rollout.engine=sglang"


def config(*overrides: str) -> RunConfig:
    return validate(RunConfig, apply_overrides(parse_yaml(MINIMAL, "minimal"), overrides), "minimal")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


class Machine:
    """One where CUDA was told `names` and sees `count` GPUs."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self._patches = patches

    def has(self, count: int, names: str | None = None) -> None:
        self._patches.setattr(torch.cuda, "is_available", lambda: count > 0)
        self._patches.setattr(torch.cuda, "device_count", lambda: count)
        if names is None:
            self._patches.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            self._patches.setenv("CUDA_VISIBLE_DEVICES", names)


@each_case(
    ("count", "names", "expected"),
    [
        (2, None, ["0", "1"]),
        (2, "3, 1", ["3", "1"]),
        (1, SLICE, [SLICE]),
        # What stands behind a name that is none, CUDA does not see.
        (1, "3,-1,2", ["3"]),
    ],
)
def test_gpus_have_cudas_names(machine: Machine, count: int, names: str | None, expected: list[str]) -> None:
    machine.has(count, names)
    assert gpus_here(config()) == expected


def test_a_slice_is_enough_for_an_engine_of_one_rank_and_not_for_two(machine: Machine) -> None:
    machine.has(2, f"{SLICE},{SLICE}")
    check_names(config(FLEET), gpus_here(config(FLEET)))
    with pytest.raises(UserError, match=r"^rollout.tp=2: SGLang wants CUDA_VISIBLE_DEVICES as numbers"):
        check_names(config(FLEET, "rollout.tp=2"), gpus_here(config(FLEET)))


@each_case(
    ("keys", "said"),
    [
        (["policy.dp=2"], r"^policy\.dp x tp x pp x cp = 2: 2 GPUs, but without cluster\.backend=ray .* the 1 of"),
        (["policy.cp=2", "policy.dp=2"], r"= 4: 4 GPUs"),
        ([FLEET, "rollout.engines=3"], r"^policy\S* x tp x pp x cp = 1, rollout.engines x tp = 3, colocated: 3 GPUs"),
        ([FLEET, "cluster.placement=disaggregated"], r"disaggregated: 2 GPUs"),
        (["cluster.gpus_per_node=2"], r"^cluster.gpus_per_node=2, but this machine has 1 GPU\(s\); lower it$"),
    ],
)
def test_more_than_there_are_names_the_keys_that_ask_for_them(machine: Machine, keys: list[str], said: str) -> None:
    """And no `cluster.nodes`, which a run without Ray has one of."""
    machine.has(1)
    with pytest.raises(UserError, match=said) as error:
        check_enough(config(*keys), gpus_here(config(*keys)))
    assert "cluster.nodes" not in str(error.value)


def test_an_evaluations_engines_are_on_the_gpus_that_it_may_use(machine: Machine, tmp_path: Path) -> None:
    """Without `cluster.gpus_per_node` too, and not on those that another job has."""
    machine.has(3, "3,5,6")
    (tmp_path / "config.json").write_text("{}")
    one = evaluation_settings(config(FLEET, "policy.dp=8"), "run.yaml", tmp_path, tmp_path)
    assert (one.rollout.engines, [*map(list, one.gpus)]) == (3, [["3"], ["5"], ["6"]])
    two = evaluation_settings(config(FLEET, "rollout.tp=2"), "run.yaml", tmp_path, tmp_path)
    assert (two.rollout.engines, [*map(list, two.gpus)]) == (1, [["3", "5"]])
    with pytest.raises(UserError, match=r"^run.yaml: rollout.tp=4 is more than this machine's GPUs=3"):
        evaluation_settings(config(FLEET, "rollout.tp=4"), "run.yaml", tmp_path, tmp_path)
    cpus = evaluation_settings(config(FLEET, "policy.device=cpu", "rollout.engines=2"), "run.yaml", tmp_path, tmp_path)
    assert (cpus.rollout.engines, list(cpus.gpus)) == (2, [])


def test_a_run_on_cpus_hides_gpus_and_another_does_not(machine: Machine) -> None:
    machine.has(1, "3")
    leave_gpus_alone(config())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    leave_gpus_alone(config("policy.device=cpu"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_ranks_that_torchrun_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "8")
    resolved: Any = SimpleNamespace(config=config("policy.device=cpu"))
    with pytest.raises(UserError, match="torchrun started 8 of this command"):
        check_placement(resolved)
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_placement(resolved)


@each_case(
    ("overrides", "cores", "expected"),
    [
        ([], 2, True),
        ([], 1, False),
        (["policy.dp=1"], 2, False),
        (["deterministic=true"], 2, False),
        (["cluster.backend=ray", "policy.tp=2"], 2, False),
        (["policy.device=cuda", "policy.tp=2"], 2, False),
        ([FLEET], 2, False),
        ([FLEET, "policy.tp=2"], 1, True),
        (["policy=7"], 2, True),
        (["nonsense"], 2, False),
    ],
)
def test_ranks_are_expected_where_the_file_may_mean_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], cores: int, expected: bool
) -> None:
    """Before torch and the schema have been imported; mistakes are not told here."""
    started: list[object] = []
    monkeypatch.setattr(early_ranks.fork_server, "start", started.append)
    monkeypatch.setattr(early_ranks, "_GPU", tmp_path / "none")
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    early_ranks.expect_ranks(file, overrides)
    assert len(started) == expected
