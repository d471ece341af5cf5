"""`megatron-to-peft`: whose the adapters are, and what the folder was made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megasharp.common.errors import UserError
from megasharp.convert.lora import RECORD
from megasharp.convert.record import read_record, tensor_sha256, weights_sha256
from megasharp.learner.conversion import hf_to_megatron, megatron_to_hf, megatron_to_peft
from megasharp.learner.verification import Probe, verify
from tests.unit.convert.adapted import save_adapted


@pytest.fixture
def checkpoint(save_model, tmp_path: Path) -> Path:
    """An adapted Qwen2 of 3 layers; its base is `model` beside it."""
    save_adapted(save_model("qwen2", initializer_range=0.02), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_the_base_model_and_the_source_are_recorded(checkpoint: Path, tmp_path: Path) -> None:
    megatron_to_peft(checkpoint, tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    record = read_record(tmp_path / "peft")
    assert record is not None
    assert (record.kind, record.source, record.family) == ("megatron-to-peft", str(checkpoint), "qwen2")
    assert (record.source_dtype, record.dtype) == ("float32", "float32")
    written = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(written) == 2 * 7 * 3
    assert record.tensors == {name: tensor_sha256(tensor) for name, tensor in written.items()}
    assert record.weights_sha256 == weights_sha256(record.tensors)
    assert record.arguments["num_hidden_layers"] == 3


def test_a_base_model_of_the_hub_is_named_by_its_id_and_commit(checkpoint: Path, tmp_path: Path) -> None:
    path, commit = checkpoint / "policy" / RECORD, "1" * 40
    folder = tmp_path / "hub" / "models--owner--tiny" / "snapshots" / commit
    path.write_text(json.dumps({**json.loads(path.read_text()), "base": str(folder)}))
    megatron_to_peft(checkpoint, tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("owner/tiny", commit)


def test_a_base_model_that_was_not_recorded_is_noted(checkpoint: Path, tmp_path: Path, capsys) -> None:
    path = checkpoint / "policy" / RECORD
    record = json.loads(path.read_text())
    del record["base"]
    path.write_text(json.dumps(record))
    megatron_to_peft(checkpoint, tmp_path / "peft")
    target = tmp_path / "peft" / "adapter_config.json"
    assert f"no record of its base model: set base_model_name_or_path in {target}" in capsys.readouterr().err
    assert json.loads(target.read_text())["base_model_name_or_path"] is None


def test_a_base_model_that_peft_cannot_load_is_not_named(save_model, checkpoint: Path, tmp_path: Path, capsys) -> None:
    """A run may begin from a Megatron folder."""
    hf_to_megatron(save_model("qwen2"), tmp_path / "megatron")
    path = checkpoint / "policy" / RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), "base": str(tmp_path / "megatron")}))
    megatron_to_peft(checkpoint, tmp_path / "peft")
    target = tmp_path / "peft" / "adapter_config.json"
    assert (
        f"{tmp_path / 'megatron'} is a Megatron folder: convert it (megatron-to-hf), then set"
        in capsys.readouterr().err
    )
    assert json.loads(target.read_text())["base_model_name_or_path"] is None


def test_weights_without_adapters_are_refused(save_model, tmp_path: Path) -> None:
    hf_to_megatron(save_model("qwen2"), tmp_path / "megatron")
    with pytest.raises(UserError, match="has no adapters, all weights were trained: use megatron-to-hf"):
        megatron_to_peft(tmp_path / "megatron", tmp_path / "peft")
    assert not (tmp_path / "peft").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_beside_the_weights_are_the_merged_model(save_model, tmp_path: Path, dtype: str) -> None:
    """Merging rounds to the weights' dtype, which adapters beside them are not: the tolerance is that dtype's."""
    source = save_model("qwen3", dtype=dtype)
    save_adapted(source, tmp_path / "checkpoint")
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "merged")
    found = verify(tmp_path / "merged", tmp_path / "checkpoint", Probe(tokens=24))
    assert found.equal, found
    assert f"(Megatron, {dtype}, adapters merged)" in found.lines[1]
    other = verify(source, tmp_path / "merged", Probe(tokens=24))
    assert other.outcome == "different" and "21 different" in "\n".join(other.lines)
