"""Folders of another kind than the one asked for: the line says what they are and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import each_case
from safetensors.torch import load_file

from megasharp.common.errors import UserError
from megasharp.convert.hf_folder import HFReader
from megasharp.learner.conversion import MegatronWeights, hf_to_megatron
from megasharp.learner.verification import verify


def error_of(read: Callable[[Path], object], folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def compare(folder: Path) -> object:
    return verify(folder, folder, None)


@each_case("read", [HFReader, MegatronWeights, compare])
@each_case("given", ["run", "run/checkpoints"])
def test_of_a_run_its_newest_checkpoint_is_offered(tmp_path: Path, read, given: str) -> None:
    for step in ("step_000002", "step_000010"):
        (tmp_path / "run" / "checkpoints" / step / "policy").mkdir(parents=True)
    message = error_of(read, tmp_path / given)
    newest = tmp_path / "run" / "checkpoints" / "step_000010"
    assert message.endswith(f": it is a run's folder, give one of its checkpoints, such as {newest}")


def test_the_other_kind_is_named_with_the_command_that_makes_it(save_model, tmp_path: Path) -> None:
    source = save_model("qwen3")
    hf_to_megatron(source, tmp_path / "megatron")
    message = error_of(HFReader, tmp_path / "megatron")
    assert message.startswith(
        f"{tmp_path / 'megatron' / 'config.json'} does not exist: not a Hugging Face model folder"
    )
    assert "it is a Megatron checkpoint folder, `megasharp convert megatron-to-hf`" in message
    message = error_of(MegatronWeights, source)
    assert message.startswith(f"{source}: not a Megatron checkpoint folder: policy/ is missing")
    assert "it is a Hugging Face folder, `megasharp convert hf-to-megatron`" in message


def test_of_a_megatron_folders_part_the_whole_is_offered(save_model, tmp_path: Path) -> None:
    whole = tmp_path / "megatron"
    hf_to_megatron(save_model("qwen3"), whole)
    for part in ("policy", "hf"):
        assert error_of(MegatronWeights, whole / part).endswith(f"checkpoint folder, give the whole: {whole}")
    message = error_of(HFReader, whole / "hf")
    assert message.endswith(f": its weights are in {whole / 'policy'}: use megatron-to-hf on {whole}")


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    for read in (MegatronWeights, compare):
        assert error_of(read, tmp_path / "absent").endswith(": it does not exist")
    assert error_of(compare, tmp_path).endswith("nor a Megatron checkpoint folder")


def test_of_the_hubs_cache_a_snapshot_is_offered_and_read(save_model, tmp_path: Path) -> None:
    source, cache = save_model("qwen3"), tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.copyfile(path, cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert f"it is the hub's cache of a model, give one of its snapshots, such as {snapshot}" in error_of(
        HFReader, cache
    )
    hf_to_megatron(snapshot, tmp_path / "megatron")
    assert not any(path.is_symlink() for path in (tmp_path / "megatron").rglob("*"))
    assert verify(source, tmp_path / "megatron", None).equal
    (snapshot / "model.safetensors").resolve().unlink()
    message = error_of(HFReader, snapshot)
    assert "model.safetensors is a link to ../../blobs/" in message and message.endswith("complete the download")


def test_weights_that_are_no_safetensors_are_named(save_model) -> None:
    source = save_model("qwen3")
    weights = source / "model.safetensors"
    torch.save(load_file(weights), source / "pytorch_model.bin")
    content = weights.read_bytes()
    weights.unlink()
    assert "only pytorch_model files: load them with transformers and save them" in error_of(HFReader, source)
    (source / "pytorch_model.bin").unlink()
    (source / "adapter_model.safetensors").write_bytes(content)
    assert "only adapters: merge them into their base model with PEFT" in error_of(HFReader, source)
    (source / "config.json").rename(source / "adapter_config.json")
    for read in (HFReader, compare):
        assert "it has adapters only, merge them into their base model with PEFT" in error_of(read, source)


def test_a_quantised_models_config_is_refused_whatever_its_tensors_are(save_model) -> None:
    source = save_model("qwen3")
    config = source / "config.json"
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": quantised}))
    message = error_of(HFReader, source)
    assert message.startswith(f"{config}: quantization_config is set: use an unquantized checkpoint")
