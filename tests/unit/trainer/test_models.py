"""The folders that a run may begin from: which are taken, and the one line for each that is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cases import each_case
from typer.testing import CliRunner

from megasharp.checkpoint.store import CheckpointStore, RunState
from megasharp.cli.main import app
from megasharp.common.errors import UserError
from megasharp.config.policy import LoraConfig
from megasharp.config.run_config import load_run
from megasharp.convert.lora import record_adapters
from megasharp.convert.model_folder import ModelFolder, model_folder
from megasharp.learner.conversion import hf_to_megatron
from megasharp.trainer.resolve.engine_settings import fleet_settings
from megasharp.trainer.resolve.models import check_content, check_named, open_memory, open_model
from megasharp.trainer.resolve.resolved_run import check
from tests.unit.saving import save_at_once

REPOSITORY = Path(__file__).resolve().parents[3]
BASE = REPOSITORY / "examples" / "quickstart" / "base"
SHARDS = "__0_0.distcp"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's base, converted."""
    folder = tmp_path_factory.mktemp("model") / "megatron"
    hf_to_megatron(BASE, folder)
    return folder


@pytest.fixture
def megatron(whole: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "megatron"))


def error_of(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_content(open_model(str(folder))[0])
    message = str(caught.value)
    assert "\n" not in message
    return message


def save_checkpoint(store: CheckpointStore, step: int, content: Path) -> Path:
    return save_at_once(
        store,
        RunState(reference="base", step=step),
        lambda folder: shutil.copytree(content, folder, dirs_exist_ok=True) and None,
    )


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_both_kinds_are_the_same_model(megatron: Path) -> None:
    of_hf, of_megatron = open_model(str(BASE)), open_model(str(megatron))
    assert of_hf[1] == of_megatron[1]
    assert (of_hf[0].is_megatron, of_megatron[0].is_megatron) == (False, True)
    assert of_megatron[0].description == megatron / "hf"
    for folder, _ in (of_hf, of_megatron):
        check_content(folder)


def test_a_checkpoint_of_a_run_is_a_model_and_the_run_is_none(megatron: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=2, keep_every=None)
    (megatron / "conversion.json").unlink()
    for step in (90, 100):
        saved = save_checkpoint(store, step, megatron)
    check_content(open_model(str(saved))[0])
    assert error_of(tmp_path / "run").endswith(f"it is a run's folder, give one of its checkpoints, such as {saved}")
    flip_a_byte(saved / "policy" / SHARDS)
    assert error_of(saved) == (
        f"{saved / 'policy' / SHARDS} differs from what was saved: name another checkpoint as the model"
    )


def test_changed_bytes_are_named_with_their_tensor(megatron: Path) -> None:
    flip_a_byte(megatron / "policy" / SHARDS)
    message = error_of(megatron)
    assert message.startswith(f"{megatron / 'policy'}: tensor model.") and "is damaged" in message


def test_files_that_are_cut_or_lost_are_named(megatron: Path) -> None:
    shards = megatron / "policy" / SHARDS
    shards.write_bytes(shards.read_bytes()[:-1000])
    assert error_of(megatron).startswith(f"{shards} is truncated: tensor ")
    shards.unlink()
    assert error_of(megatron).startswith(f"{shards} does not exist, but tensor ")
    shutil.rmtree(megatron / "policy")
    assert error_of(megatron) == f"{megatron}: not a Megatron checkpoint folder: policy/ is missing"


def test_another_models_config_is_refused_by_its_key(megatron: Path) -> None:
    config = megatron / "hf" / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    assert "rms_norm_eps=1e-05, recorded 1e-06" in error_of(megatron)


def test_what_is_no_model_is_told_what_one_is_and_what_to_give(megatron: Path, tmp_path: Path) -> None:
    kinds = "(Hugging Face's, one that `megasharp convert hf-to-megatron` made, or a run's checkpoint)"
    assert error_of(tmp_path / "absent") == f"{tmp_path / 'absent'} is no model's folder {kinds}: it does not exist"
    part = f"it is a part of a Megatron checkpoint folder, give the whole: {megatron}"
    assert error_of(megatron / "hf") == f"{megatron / 'hf'} is no model's folder {kinds}: {part}"
    (tmp_path / "empty").mkdir()
    assert error_of(tmp_path / "empty") == f"{tmp_path / 'empty'} is no model's folder {kinds}"
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_every=None)
    saved = save_checkpoint(store, 90, megatron)
    message = error_of(tmp_path / "checkpoints" / "latest")
    assert message.endswith(
        f"it is a file that names a run's newest checkpoint, which is another after its next: give {saved}"
    )


@pytest.mark.parametrize("lost", ["metadata.json", "common.pt"])
def test_files_that_only_a_run_reads_are_missed_before_it_begins(megatron: Path, lost: str) -> None:
    (megatron / "policy" / lost).unlink()
    with pytest.raises(UserError, match=f"{lost} is missing, copy the whole folder"):
        open_model(str(megatron))


def test_weights_without_a_record_are_noted_once(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (megatron / "conversion.json").unlink()
    check_content(open_model(str(megatron))[0])
    assert capsys.readouterr().err.count("has no record of the model's arguments") == 1


def test_of_a_checkpoint_the_memory_network_is_taken_if_it_has_one(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=3, keep_every=None)
    policy, memory = tmp_path / "policy_alone", tmp_path / "with_memory"
    shutil.copytree(megatron, policy)
    shutil.copytree(megatron, memory)
    hf_to_megatron(BASE.parent / "memory", memory / "memory")
    alone, both = save_checkpoint(store, 1, policy), save_checkpoint(store, 2, memory)

    found, architecture = open_memory(str(both))
    assert found == ModelFolder(both / "memory", is_megatron=True)
    assert architecture.hidden == open_model(str(BASE.parent / "memory"))[1].hidden
    assert architecture.hidden != open_model(str(both))[1].hidden
    assert capsys.readouterr().err == (
        f"megasharp: note: the memory network begins with that of {both}: {both / 'memory'}\n"
    )
    assert open_memory(str(alone))[0] == ModelFolder(alone, is_megatron=True)
    assert capsys.readouterr().err == (
        f"megasharp: note: the memory network begins with the policy of {alone}, which has no memory network\n"
    )
    open_memory(str(megatron))
    open_memory(str(BASE.parent / "memory"))
    assert capsys.readouterr().err == ""

    check_content(found)
    flip_a_byte(both / "memory" / "policy" / SHARDS)
    with pytest.raises(UserError, match="differs from what was saved: name another checkpoint"):
        check_content(found)


def test_a_memory_network_without_its_config_is_refused(megatron: Path) -> None:
    """Older versions saved its shards alone; the config.json there is the policy's."""
    (megatron / "memory").mkdir()
    with pytest.raises(
        UserError, match=r"memory holds a memory network without its config.json \(.*/hf is the policy's"
    ):
        open_memory(str(megatron))


def test_weights_alone_are_no_model(megatron: Path) -> None:
    assert error_of(megatron / "policy").endswith(f"give the whole: {megatron}")


def test_adapters_are_to_be_merged_first(megatron: Path) -> None:
    record_adapters(megatron / "policy", LoraConfig(rank=4, alpha=8.0, targets=["qkv"]), BASE)
    assert error_of(megatron) == (
        f"{megatron} holds adapters beside frozen weights: merge them with `megasharp convert megatron-to-hf "
        f"{megatron} FOLDER` and name that folder"
    )


def test_engines_read_no_weights_of_a_model_that_they_cannot_read(megatron: Path, tmp_path: Path) -> None:
    config = load_run(REPOSITORY / "examples" / "fleet_on_cpu" / "run.yaml", ["rollout.sglang={page_size: 16}"])
    of_hf, of_megatron = model_folder(BASE), ModelFolder(megatron, is_megatron=True)
    settings = fleet_settings(config, of_hf, of_hf, tmp_path)
    assert settings.model == BASE and settings.rollout.sglang == {"page_size": 16}
    for policy, memory in ((of_megatron, None), (of_megatron, of_hf), (of_hf, of_megatron)):
        settings = fleet_settings(config, policy, memory, tmp_path)
        assert settings.rollout.sglang == {"page_size": 16, "load_format": "dummy"}
        assert (settings.model / "config.json").is_file() and settings.model == policy.description


OF_TWO_GPUS = ("policy.device=cuda", "policy.tp=2", "rollout.engine=sglang")


def stand_in_python(folder: Path, said: str = "") -> str:
    """A shell script that answers as the engines' Python does when it is asked for its packages."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit {2 if said else 0}\n')
    python.chmod(0o755)
    return f"rollout.python={python}"


def test_a_preset_is_described_where_its_model_is_not_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline and with an empty cache: sizes are those of configs/model, and a line says what was not checked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    command = ["train", "algo/paper/ds_math_qwen3-1.7b.yaml", "--dry-run", *OF_TWO_GPUS]
    done = CliRunner().invoke(app, [*command, stand_in_python(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "model      qwen3, 1,720,574,976 parameters" in done.output
    assert "note       CUDA_DEVICE_MAX_CONNECTIONS=8 is kept" in done.output
    absent = "for Qwen/Qwen3-1.7B is no folder here"
    assert f"not checked: weights, tokenizer, prompts, suites and the engines' flags, {absent}" in done.output
    done = CliRunner().invoke(app, [*command, f"rollout.python={tmp_path}/only/on/nodes"])
    assert f"suites, and the engines' packages and flags (their Python is not here), {absent}" in done.output


@each_case(
    ("said", "message"),
    [
        ("reward: {function: 'mine:corect'}", "mine has no 'corect'; nearest is correct; known are: correct, digits"),
        ("reward: {function: 'nofile:x'}", "cannot import nofile (ModuleNotFoundError: No module named 'nofile'); put"),
        ("reward: {functions: [{function: 'mine:corect'}]}", "mine has no 'corect'; nearest is correct"),
        ("data: {mix: [{set: gsm8k, reward: 'mine:corect'}]}", "mine has no 'corect'; nearest is correct"),
        ("reward: {function: 'mine:correct'}", ""),
    ],
)
def test_a_reward_that_cannot_be_imported_is_refused_without_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, message: str
) -> None:
    """It is found beside the run file, as in training."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    rewards = "".join(f"def {name}(text, answer):\n    return 1.0\n" for name in ("digits", "correct"))
    (tmp_path / "dry_rewards.py").write_text(rewards)
    run_file = tmp_path / "run.yaml"
    data = "" if said.startswith("data") else "data: {set: gsm8k}, "
    written = said.replace("mine:", "dry_rewards:")
    run_file.write_text(
        f"{{name: mine, model: {{path: Qwen/Qwen3-1.7B}}, {data}recipe: {{methods: [grpo]}}, steps: 3, {written}}}"
    )
    done = CliRunner().invoke(app, ["train", str(run_file), "--dry-run"])
    if message:
        assert isinstance(done.exception, UserError), done.output
        assert str(done.exception).startswith(f"reward.function: {message.replace('mine', 'dry_rewards')}")
    else:
        assert done.exit_code == 0 and "not checked: weights, tokenizer" in done.output, done.output


def test_engines_that_could_not_run_are_refused_without_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    said = "error: the engines' Python has torch 2.13.0+cpu, which knows no CUDA"
    python = stand_in_python(tmp_path, said)
    done = CliRunner().invoke(app, ["train", "algo/paper/ds_math_qwen3-1.7b.yaml", "--dry-run", *OF_TWO_GPUS, python])
    assert isinstance(done.exception, UserError)
    assert str(done.exception) == f"rollout.python: {tmp_path}/python: {said.removeprefix('error: ')}"


def test_a_row_that_needs_what_does_not_exist_says_so() -> None:
    """In its file, and before anything is fetched for it."""
    missing = set()
    for row in sorted((REPOSITORY / "configs/algo/paper").glob("[!_]*.yaml")):
        config = load_run(row)
        try:
            check_named(config, row.name)
        except UserError:
            missing.add(row.name)
        assert ("# Missing here: " in row.read_text()) == (row.name in missing), row.name
    assert len(missing) == 6
    lean = load_run(REPOSITORY / "configs/algo/paper/unlikeliness_lean_deepseek-prover-v1.5-sft.yaml")
    with pytest.raises(UserError, match=r"lean\.yaml: data\.task: unknown task 'lean'; known tasks: "):
        check(lean, "lean.yaml")
