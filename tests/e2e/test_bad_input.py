"""What a user gets wrong: one clear line, exit code 2, nothing half-written."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from quickstart import QUICKSTART, REPOSITORY, SMALL

from megasharp.cli import main


def _mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command in this process; returns its one line."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", ["megasharp", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2, error
    assert error.count("\n") == 1, error
    return error


@pytest.fixture
def mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    def call(*arguments: str) -> str:
        runs = tmp_path / "runs"
        line = _mistake(monkeypatch, capsys, "train", QUICKSTART, "--runs", str(runs), *SMALL, "steps=1", *arguments)
        assert not runs.exists(), "something was written"
        return line

    return call


def _base(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REPOSITORY / "examples" / "quickstart" / "base", tmp_path / "base"))


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("given", "said"), [("--port=80", "add --serve"), ("--serve --out=x.html", "leave one of them")]
)
def test_what_a_report_would_ignore(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, said: str
) -> None:
    assert said in _mistake(monkeypatch, capsys, "report", "nowhere", *given.split())


def test_unknown_key(mistake) -> None:
    line = mistake("policy.tpp=2")
    assert "run.yaml: policy.tpp: unknown key" in line
    assert "tp, pp" in line


def test_wrong_type(mistake) -> None:
    assert "policy.tp: " in mistake("policy.tp=two")


def test_a_reward_of_ones_own_that_is_no_function(mistake) -> None:
    assert "reward.function: cannot import nowhere.rewards" in mistake("reward.function=nowhere.rewards:brief")


def test_gpus_that_there_are_none_of(mistake) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert "policy.device=cuda, but torch finds no GPU on this machine" in mistake("policy.device=cuda")
    assert "cluster.gpus_per_node=8, but torch finds no GPU" in mistake("cluster.gpus_per_node=8")


def test_a_limit_that_nobody_keeps(mistake) -> None:
    assert "reward.timeout_s is kept by worker processes" in mistake("reward.timeout_s=3")


def test_engines_in_a_python_without_sglang(mistake) -> None:
    """The trainer's own Python."""
    line = mistake("rollout.engine=sglang", f"rollout.python={sys.executable}")
    assert "needs exactly 0.5.21" in line and "make fleet" in line


def test_keys_of_engines_that_there_are_none_of(mistake) -> None:
    assert "rollout.sglang is for engines of their own" in mistake("rollout.sglang={page_size: 16}")
    assert "sync.verify is for engines of their own" in mistake("sync.verify=true")
    assert "cluster.nodes=2 needs cluster.backend=ray" in mistake("cluster.nodes=2")


def test_methods_that_do_not_go_together(mistake) -> None:
    assert "unknown method 'gropo'" in mistake("recipe.methods=[gropo]")
    assert "'grpo' and 'rloo' are both the estimator" in mistake("recipe.methods=[grpo,rloo]")


def test_unknown_method(mistake) -> None:
    assert "unknown method 'grppo'" in mistake("recipe.methods=[grppo]")


def test_missing_checkpoint_folder(mistake) -> None:
    assert "no/such/folder" in mistake("model.path=no/such/folder")


def test_unsupported_architecture(mistake, tmp_path: Path) -> None:
    base = _base(tmp_path)
    _edit_config(base, architectures=["GPT2LMHeadModel"], model_type="gpt2")
    line = mistake(f"model.path={base}")
    assert "config.json" in line
    assert "GPT2LMHeadModel" in line


def test_tokenizer_larger_than_the_model(mistake, tmp_path: Path) -> None:
    base = _base(tmp_path)
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["extra"] = max(vocabulary.values()) + 5
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "vocab" in mistake(f"model.path={base}")


def test_tp_that_does_not_divide_heads(mistake) -> None:
    assert "policy.tp=3 does not divide" in mistake("policy.tp=3")


def test_truncated_safetensors(mistake, tmp_path: Path) -> None:
    base = _base(tmp_path)
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in mistake(f"model.path={base}")


def test_missing_data_file(mistake) -> None:
    assert "no.jsonl" in mistake("data.path=no.jsonl")


def test_more_passes_than_samples(mistake) -> None:
    assert "pass@128" in mistake("eval.k=[1,128]")


def test_unknown_suite(mistake) -> None:
    assert "countdown_dev" in mistake("eval.suites=[nothing]")


def test_existing_run_without_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "config.yaml").write_text("name: quickstart\n")
    (tmp_path / "quickstart" / "metrics.jsonl").write_text('{"step": 1}\n')
    line = _mistake(monkeypatch, capsys, "train", QUICKSTART, "--runs", str(tmp_path), *SMALL)
    assert "--resume" in line
    assert (tmp_path / "quickstart" / "config.yaml").read_text() == "name: quickstart\n"


def test_missing_run_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing.yaml" in _mistake(monkeypatch, capsys, "train", "nothing.yaml")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("{bogus: 1}", "no such option"),
        ("{lr: 1.0}", "policy.megatron.lr: set policy.optimizer.lr"),
        ("{hidden_size: 4}", "megasharp sets this itself"),
        ("{overlap_grad_reduce: true}", "set policy.overlap"),
        ("{cuda_graph_impl: local}", "packed micro-batches have no fixed shape"),
        ("{cuda_graph_warmup_steps: 3}", "packed micro-batches have no fixed shape"),
        ("{external_cuda_graph: true}", "packed micro-batches have no fixed shape"),
        ("{optimizer_cpu_offload: true}", "set policy.optimizer_offload"),
        ("{num_moe_experts: 4}", "another model"),
        ("{rotary_interleaved: true}", "another model"),
        ("{softmax_scale: 0.5}", "another model"),
        ("{attention_softmax_in_fp32: maybe}", "Megatron-core expects bool, found"),
    ],
)
def test_options_passed_through_to_megatron(mistake, option: str, reason: str) -> None:
    line = mistake(f"policy.megatron={option}")
    assert option.strip("{").split(":")[0] in line
    assert reason in line


def test_resume_never_touches_a_folder_that_is_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "quickstart" / "data").mkdir(parents=True)
    line = _mistake(monkeypatch, capsys, "train", QUICKSTART, "--runs", str(tmp_path), *SMALL, "--resume")
    assert "not a run folder" in line
    assert (tmp_path / "quickstart" / "data").is_dir()


def test_a_file_where_the_run_folder_should_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "quickstart").write_text("")
    line = _mistake(monkeypatch, capsys, "train", QUICKSTART, "--runs", str(tmp_path), *SMALL)
    assert "cannot make the run folder" in line
