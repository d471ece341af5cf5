"""Values that a run file leaves open: found from device, data and plan, stored, and kept on a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common import control_group
from megasharp.config.core import dump_yaml, merge, parse_yaml, validate
from megasharp.config.run_config import RunConfig, load_run
from megasharp.convert.hf_folder import read_config
from megasharp.trainer.resolve import derived as derivation
from megasharp.trainer.resolve import devices
from megasharp.trainer.resolve.derived import derived
from megasharp.trainer.resolve.devices import available_cores, cpu_threads
from megasharp.trainer.resolve.engine_settings import check_context
from megasharp.trainer.resolve.resolved_run import check
from megasharp.trainer.resolve.summary import describe
from megasharp.trainer.stored_config import resumed_config

REPOSITORY = Path(__file__).resolve().parents[3]
BASE = REPOSITORY / "examples" / "quickstart" / "base"
MODELS = REPOSITORY / "configs" / "model"


def run(model: object, **data: object) -> RunConfig:
    given = {"path": "rows.jsonl", **data}
    return validate(RunConfig, {"name": "r", "steps": 2, "model": {"path": str(model)}, "data": given}, "run.yaml")


def sizes(config: RunConfig) -> tuple[str, int, int, int]:
    return (
        config.model.dtype,
        config.data.max_prompt_tokens,
        config.data.max_response_tokens,
        config.policy.micro_batch_tokens,
    )


@pytest.fixture
def one_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("megasharp.trainer.resolve.derived.gpu_memory_mib", lambda: 81_559)


def test_on_the_cpu_lengths_come_from_prompts_task_and_positions() -> None:
    architecture = read_config(MODELS / "qwen3-1.7b")[2]
    lengths = [*range(100, 1099), 9_000, 30]
    config, clauses = derived(run("m", task="math"), architecture, lengths)
    assert sizes(config) == ("float32", 1_104, 4_096, 8_192)
    assert clauses[1] == "data.max_prompt_tokens 1104 (the longest of 1001 prompts has 9000)"
    small = read_config(BASE)[2]
    assert sizes(derived(run("m"), small, [60])[0]) == ("float32", 32, 32, 8_192)
    explicit = run("m", max_prompt_tokens=7, max_response_tokens=9)
    assert sizes(derived(explicit, small, [60])[0])[1:3] == (7, 9)


def test_a_response_leaves_the_positions_that_sglang_keeps() -> None:
    """Math's 4,096 are all positions of Qwen2.5-Math; in this process the prompt alone is subtracted."""
    architecture = read_config(MODELS / "qwen2.5-math-7b")[2]
    alone = run("m", task="math")
    engines = alone.model_copy(update={"rollout": alone.rollout.model_copy(update={"engine": "sglang"})})
    found = [derived(config, architecture, [1000]) for config in (alone, engines)]
    assert [sizes(config)[1:3] for config, _ in found] == [(1008, 4096 - 1008), (1008, 4096 - 1008 - 6)]
    why = "the positions of the model less 1008 of the prompt and 6 that SGLang keeps"
    assert f"data.max_response_tokens 3082 ({why})" in found[1][1]
    check_context(found[1][0], architecture.max_positions, "run.yaml")


@pytest.mark.usefixtures("one_h100")
def test_on_a_gpu_a_micro_batch_is_as_large_as_the_plan_fits() -> None:
    """The 1.7B model fits with four of its longest sequences; Qwen3-8B on one GPU does not fit at all."""
    found = {}
    for name in ("qwen3-1.7b", "qwen3-8b"):
        model = MODELS / name
        found[name] = derived(run(model, set="gsm8k", path=None), read_config(model)[2], [200])
    config, clauses = found["qwen3-1.7b"]
    longest = 208 + 4_096
    assert config.model.dtype == "bfloat16"
    assert longest <= config.policy.micro_batch_tokens <= 4 * longest + 1_024
    assert "sequence of 4304 fits a GPU of 81559 MiB" in clauses[-1]
    assert "does not fit a GPU of 81559 MiB" in found["qwen3-8b"][1][-1]


def test_what_was_derived_is_printed_stored_and_kept(tmp_path: Path) -> None:
    tree = parse_yaml((REPOSITORY / "examples/quickstart/run.yaml").read_text(), "run.yaml")
    del tree["data"]["max_prompt_tokens"], tree["data"]["max_response_tokens"], tree["policy"]["micro_batch_tokens"]
    del tree["model"]["dtype"]
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    resolved = check(load_run(tmp_path / "run.yaml"), "run.yaml")
    assert sizes(resolved.config) == ("float32", 16, 32, 8_192)
    assert "derived    model.dtype float32 (on the CPU), data.max_prompt_tokens 16 (" in describe(resolved)
    (tmp_path / "config.yaml").write_text(dump_yaml(resolved.config).replace("prompt_tokens: 16", "prompt_tokens: 20"))
    kept = resumed_config(tmp_path, tree, "run.yaml", lambda line: None)
    assert sizes(kept) == ("float32", 20, 32, 8_192)
    open_ = {"model": {**tree["model"], "dtype": "auto"}, "data": {**tree["data"], "max_prompt_tokens": None}}
    assert resumed_config(tmp_path, {**tree, **open_}, "run.yaml", lambda line: None) == kept


@pytest.mark.usefixtures("one_h100")
def test_engines_that_fill_a_gpu_while_they_sample_take_no_room_from_micro_batches() -> None:
    model = MODELS / "qwen2.5-7b"
    tree = {
        "name": "r",
        "steps": 2,
        "model": {"path": str(model)},
        "data": {"set": "gsm8k"},
        "policy": {"dp": 2, "tp": 4},
        "rollout": {"engine": "sglang", "engines": 8},
        "cluster": {"backend": "ray", "gpus_per_node": 8},
    }
    config = validate(RunConfig, tree, "run.yaml")
    assert derived(config, read_config(model)[2], [1_000])[0].policy.micro_batch_tokens == 4 * 5 * 1024


def has_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    for module in (derivation, devices):
        monkeypatch.setattr(module, "available_cores", lambda: cores)


def replicas(monkeypatch: pytest.MonkeyPatch, cores: int, gib: float, overrides: dict[str, object]) -> tuple[int, str]:
    """The derived `policy.dp` of a run with 48 prompts a step on such a machine, and its clause."""
    has_cores(monkeypatch, cores)
    monkeypatch.setattr(derivation, "machine_memory", lambda: int(gib * 2**30))
    tree = {"name": "r", "steps": 2, "model": {"path": "m"}, "data": {"path": "rows.jsonl", "prompts_per_step": 48}}
    config = validate(RunConfig, merge(tree, overrides), "run.yaml")
    found, clauses = derived(config, read_config(BASE)[2], [10])
    return found.policy.dp, next((clause for clause in clauses if "policy.dp" in clause), "")


@each_case(
    ("cores", "gib", "overrides", "expected"),
    [
        (2, 24.0, {}, 2),
        (16, 24.0, {}, 4),
        (1, 24.0, {}, 1),
        # Two replicas of 1 GiB and the weights are more than half of it.
        (2, 4.0, {}, 1),
        (4, 7.0, {}, 3),
        (4, 24.0, {"data": {"prompts_per_step": 17}}, 2),
        (4, 24.0, {"data": {"prompts_per_step": 15}}, 1),
        (4, 24.0, {"deterministic": True}, 1),
        (4, 24.0, {"policy": {"tp": 2}}, 1),
        (4, 24.0, {"policy": {"cp": 2}}, 1),
        (4, 24.0, {"rollout": {"engine": "sglang"}}, 1),
        (4, 24.0, {"cluster": {"backend": "ray"}}, 1),
        (4, 24.0, {"policy": {"dp": 1}}, 1),
        (1, 24.0, {"policy": {"dp": 2}}, 2),
    ],
)
def test_a_cpu_run_has_a_replica_for_each_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, gib: float, overrides: dict[str, object], expected: int
) -> None:
    """Only where all of what makes replicas pay and fit is there; told only where there are several."""
    found, clause = replicas(monkeypatch, cores, gib, overrides)
    assert found == expected
    several = expected > 1 and "dp" not in str(overrides)
    assert clause == (f"policy.dp {expected} (on {cores} cores)" if several else "")


@pytest.mark.usefixtures("one_h100")
def test_a_gpu_run_has_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replicas(monkeypatch, 8, 24.0, {"policy": {"micro_batch_tokens": 64}}) == (1, "")


def test_the_number_of_replicas_stays_what_a_run_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine with other cores; a stored run without a number is older, and has one."""
    has_cores(monkeypatch, 2)
    file = REPOSITORY / "examples/quickstart/run.yaml"
    stored = dump_yaml(check(load_run(file), "run.yaml").config)
    assert "\n  dp: 2\n" in stored
    tree = parse_yaml(file.read_text(), "run.yaml")
    for text, expected in ((stored, 2), (stored.replace("  dp: 2\n", ""), 1), (stored.replace("dp: 2", "dp: 1"), 1)):
        (tmp_path / "config.yaml").write_text(text)
        assert resumed_config(tmp_path, tree, "run.yaml", lambda line: None).policy.dp == expected
        open_ = merge(tree, {"policy": {"dp": None}})
        assert resumed_config(tmp_path, open_, "run.yaml", lambda line: None).policy.dp == expected


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """By OMP_NUM_THREADS, else by the machine and a container's quota; a small model has one thread each."""
    small = read_config(BASE)[2]
    large = replace(small, num_layers=40)
    assert large.parameter_count() > devices.ONE_THREAD_BELOW > small.parameter_count()
    monkeypatch.setattr(devices, "_TORCH_THREADS", 6)
    monkeypatch.setattr(control_group, "core_limit", lambda: None)
    for name in ("OMP_NUM_THREADS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    found = [cpu_threads(each, ranks, False) for each in (small, large) for ranks in (1, 2, 4, 8)]
    assert found == [1, 1, 1, 1, 6, 3, 1, 1]
    assert cpu_threads(large, 1, True) == 1
    for quota, cores in ((2.5, 2), (0.5, 1), (9.0, 6)):
        monkeypatch.setattr(control_group, "core_limit", lambda quota=quota: quota)
        assert available_cores() == cores
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert [cpu_threads(small, ranks, False) for ranks in (1, 2, 4)] == [6, 3, 1]


@each_case(
    ("job", "cores"),
    [
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "1", "SLURM_CPUS_ON_NODE": "1"}, 1),
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "2", "SLURM_CPUS_ON_NODE": "4"}, 2),
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "4"}, 4),
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "128"}, 6),
        ({"SLURM_JOB_ID": "1"}, 6),
        # A value of the user's own, outside of any job.
        ({"SLURM_CPUS_PER_TASK": "1"}, 6),
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "1", "OMP_NUM_THREADS": "6"}, 6),
    ],
)
def test_a_slurm_job_has_the_cores_that_it_asked_for(
    monkeypatch: pytest.MonkeyPatch, job: dict[str, str], cores: int
) -> None:
    """Not all of a machine whose processes Slurm does not bind."""
    monkeypatch.setattr(devices, "_TORCH_THREADS", 6)
    monkeypatch.setattr(control_group, "core_limit", lambda: None)
    for name in ("OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert available_cores() == cores
