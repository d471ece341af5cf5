"""The schema of a run: what ships parses, bad combinations are caught."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from megasharp.algos import METHODS
from megasharp.common.errors import UserError
from megasharp.config.core import dump_yaml, parse_yaml, validate
from megasharp.config.log import RolloutTablesConfig
from megasharp.config.run_config import RunConfig, load_run
from megasharp.convert.lora import TARGETS

REPOSITORY = Path(__file__).parents[3]
MINIMAL = """
name: tiny
steps: 3
model: {path: some/folder}
data: {task: countdown, path: train.jsonl}
"""


ADAPTERS = [
    ("policy.lora={}", "policy.lora.rank: this key is required"),
    ("policy.lora.rank=0", "policy.lora.rank: expected integer >= 1, found 0"),
    ("policy.lora={rank: 4, alpha: 0.0}", "policy.lora.alpha: expected number > 0, found 0.0"),
    ("policy.lora={rank: 4, targets: [head]}", 'policy.lora.targets.0: expected qkv, proj, fc1 or fc2, found "head"'),
    ("policy.lora={rank: 4, targets: []}", "policy.lora.targets: expected non-empty list of"),
    ("policy.lora={rank: 4, targets: [qkv, fc1, qkv]}", "policy.lora: targets: qkv, fc1, qkv names one twice"),
    (
        "policy.lora={rank: 4, dropout: 0.1}",
        "policy.lora.dropout: unknown key, without a counterpart here .*: models are trained without dropout",
    ),
]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    return file


@each_case(("override", "message"), ADAPTERS)
def test_adapters_that_cannot_be(run_file: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        load_run(run_file, [override])
    assert "\n" not in str(refused.value)


def test_adapters_are_on_every_map_unless_said_otherwise(run_file: Path) -> None:
    assert load_run(run_file).policy.lora is None
    lora = load_run(run_file, ["policy.lora.rank=8"]).policy.lora
    assert lora is not None and lora.rank == 8 and tuple(lora.targets) == TARGETS


@each_case("file", sorted(REPOSITORY.glob("examples/*/run.yaml")), ids=lambda file: file.parent.name)
def test_shipped_runs_parse(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    load_run(file)


def test_all_missing_keys_are_named_in_the_order_of_the_schema(run_file: Path) -> None:
    run_file.write_text("steps: 3\n")
    with pytest.raises(UserError, match=r"name: this key is required, and so are model, data$"):
        load_run(run_file)
    run_file.write_text("name: mine\nsteps: 3\nmodel: {path: base}\n")
    with pytest.raises(UserError, match=r"data: this key is required; give data.path, data.set or data.mix$"):
        load_run(run_file)


def test_something_is_shipped() -> None:
    assert list(REPOSITORY.glob("examples/*/run.yaml")) and list(REPOSITORY.glob("configs/**/*.yaml"))


@each_case(
    ("override", "message"),
    [
        ("recipe.caspp.alpha=1", "recipe.caspp: unknown key, and no method has this name, nearest is casp; known"),
        ("policy.tpp=2", "policy.tpp: unknown key, nearest is tp; known keys here: device, dp, tp, pp"),
        (
            "recipe.grpo.epsilonn=1",
            "recipe.grpo.epsilonn: unknown key, nearest is epsilon; known keys here: std, epsilon",
        ),
        ("name=../outside", "name: expected string of letters, digits and"),
        ("steps=0", "steps: expected integer >= 1, found 0"),
        ("model.dtype=float16", "model.dtype: expected auto, float32 or bfloat16, found"),
        ("rollout.temperature=0.0", "rollout.temperature: expected number > 0, found 0.0"),
        ("eval.n=8", "eval: n=8 samples cannot give pass@64; raise eval.n or lower eval.k"),
        ("eval.k=[0]", "eval: k: give at least one value, all >= 1"),
        ("policy.optimizer.betas=[0.9]", "policy.optimizer.betas: expected list of 2 numbers"),
    ],
)
def test_bad_values_are_one_line(run_file: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        load_run(run_file, [override])
    assert str(run_file) in str(refused.value) and "\n" not in str(refused.value)


def test_every_method_has_its_table(run_file: Path) -> None:
    recipe = load_run(run_file).recipe
    assert recipe.params().keys() == METHODS.keys()
    assert load_run(run_file, ["recipe.kl.coefficient=1e-2"]).recipe.params()["kl"].coefficient == 0.01


def test_resolved_configuration_reads_the_same(run_file: Path) -> None:
    config = load_run(run_file, ["policy.optimizer.lr=1e-7", "policy.megatron.some_flag=true"])
    assert validate(RunConfig, parse_yaml(dump_yaml(config), "resolved"), "resolved") == config


@each_case(
    ("data", "message"),
    [
        ("{}", "data: give path, with rows of your own"),
        ("{task: math, set: math500}", "data: task is for rows of your own or a task.s file, not for set"),
    ],
)
def test_data_is_a_task_or_a_set(data: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"name: r\nsteps: 1\nmodel: {{path: m}}\ndata: {data}\n")
    with pytest.raises(UserError, match=message):
        load_run(file)


OLDER_FORMS = [
    ("{}", RolloutTablesConfig()),
    ("{rollouts: true}", RolloutTablesConfig(keep_last=None)),
    ("{rollouts: true, rollout_tokens: 256}", RolloutTablesConfig(keep_last=None, tokens=256)),
    ("{rollout_tokens: 256}", RolloutTablesConfig(tokens=256)),
    ("{rollout_tokens: 256, rollouts: {every: 3}}", RolloutTablesConfig(tokens=256, every=3)),
    ("{rollouts: false}", None),
    ("{rollouts: false, rollout_tokens: 256}", None),
    ("{rollouts: null}", None),
]


@each_case(("log", "tables"), OLDER_FORMS)
def test_what_files_said_of_tables_of_responses_before_they_had_retention_means_the_same(
    run_file: Path, log: str, tables: RolloutTablesConfig | None
) -> None:
    """All tables stay where a file says so; the configuration that is stored has the present keys alone."""
    run_file.write_text(f"{MINIMAL}log: {log}\n")
    run = load_run(run_file)
    assert run.log.rollouts == tables
    stored = parse_yaml(dump_yaml(run), "stored")
    assert "rollout_tokens" not in stored["log"]
    assert validate(RunConfig, stored, "stored") == run
    assert load_run(run_file, ["log.rollouts=true"]).log.rollouts is not None
    assert load_run(run_file, ["log.rollouts=false"]).log.rollouts is None


def test_a_key_and_its_older_name_are_refused_together(run_file: Path) -> None:
    with pytest.raises(UserError, match=r"log: rollout_tokens is the older name of rollouts\.tokens"):
        load_run(run_file, ["log={rollout_tokens: 5, rollouts: {tokens: 7}}"])
    with pytest.raises(UserError, match=r'log: expected integer >= 0, found "many"'):
        load_run(run_file, ["log.rollout_tokens=many"])
