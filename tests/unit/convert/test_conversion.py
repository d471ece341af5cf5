"""Converting whole folders: what is carried over and recorded, and one line for everything that can be wrong."""

from __future__ import annotations

import json
import pickle
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each_case
from safetensors.torch import load_file, save_file

from megasharp.common.errors import UserError
from megasharp.convert.record import read_record
from megasharp.learner.conversion import hf_to_megatron, megatron_to_hf

FC1 = "decoder.layers.mlp.linear_fc1.weight"


@pytest.fixture
def megatron(save_model, tmp_path: Path) -> Path:
    """A converted Qwen3 of 3 layers."""
    hf_to_megatron(save_model("qwen3"), tmp_path / "megatron")
    return tmp_path / "megatron"


def error_of(source: Path, convert: Callable[[Path, Path], None] = megatron_to_hf) -> str:
    """The one line of a conversion that fails, which leaves nothing."""
    before = sorted(path.name for path in source.parent.iterdir())
    with pytest.raises(UserError) as caught:
        convert(source, source.parent / "result")
    assert sorted(path.name for path in source.parent.iterdir()) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@each_case("dtype", ["float32", "bfloat16"])
@each_case("family", ["qwen3", "qwen2", "olmo2"])
def test_there_and_back(save_model, tmp_path: Path, family: str, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    source = save_model(family, shard=9000, dtype=dtype)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (source / name).write_text(f"content of {name}")
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=9000)
    back = tmp_path / "back"
    assert len(list(back.glob("model-*.safetensors"))) > 3
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (back / name).read_bytes() == (source / name).read_bytes(), name
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (source, back))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


def test_records_say_what_was_converted(save_model, tmp_path: Path) -> None:
    source = save_model("qwen3", tie_word_embeddings=True)
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", dtype="bfloat16")
    there, back = read_record(tmp_path / "megatron"), read_record(tmp_path / "back")
    assert there is not None and back is not None
    assert (there.kind, back.kind) == ("hf-to-megatron", "megatron-to-hf")
    assert there.source == str(source) and there.family == "qwen3"
    assert there.software.keys() == {"megasharp", "megatron-core", "torch", "transformers"}
    assert there.arguments["rope_theta"] == 10000.0 and there.arguments["head_dim"] == 8
    # The digests are of the source's tensors, not of the rounded ones.
    assert there.tensors == back.tensors and there.weights_sha256 == back.weights_sha256
    assert (back.source_dtype, back.dtype) == ("float32", "bfloat16")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_file(tmp_path / "back" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_the_digest_of_the_weights_depends_on_each_value(save_model, tmp_path: Path) -> None:
    source = save_model("qwen2")
    hf_to_megatron(source, tmp_path / "one")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-7
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    hf_to_megatron(source, tmp_path / "other")
    one, other = read_record(tmp_path / "one"), read_record(tmp_path / "other")
    assert one is not None and other is not None and one.weights_sha256 != other.weights_sha256
    assert [name for name in one.tensors if one.tensors[name] != other.tensors[name]] == ["model.norm.weight"]


def test_a_dtype_that_config_does_not_name_is_refused_or_rounded(save_model, tmp_path: Path) -> None:
    source = save_model("qwen3")
    edit_json(source / "config.json", dtype="bfloat16")
    message = error_of(source, hf_to_megatron)
    assert message.startswith(f"{source / 'model.safetensors'}: tensor model.embed_tokens.weight has dtype float32")
    hf_to_megatron(source, tmp_path / "megatron", dtype="bfloat16")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    expected, found = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert all(torch.equal(tensor.bfloat16(), found[name]) for name, tensor in expected.items())
    with pytest.raises(UserError, match="--dtype int8: choose from float32, bfloat16, float16"):
        hf_to_megatron(source, tmp_path / "other", dtype="int8")


def test_a_layout_the_model_cannot_be_cut_by_is_refused(save_model, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--tp=3 does not divide heads=4"):
        hf_to_megatron(save_model("qwen3"), tmp_path / "megatron", tp=3)


@each_case(
    ("key", "value", "expected"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}, "rope_theta=500000.0, recorded 10000.0"),
        ("rms_norm_eps", 1e-5, "rms_norm_eps=1e-05, recorded 1e-06"),
        ("head_dim", 4, "head_dim=4, recorded 8"),
        ("num_attention_heads", 8, "num_attention_heads=8, recorded 4"),
        ("num_key_value_heads", 4, "num_key_value_heads=4, recorded 2"),
        ("tie_word_embeddings", True, "tie_word_embeddings=True, recorded False"),
        ("vocab_size", 52, "vocab_size=52, recorded 53"),
        ("intermediate_size", 16, "intermediate_size=16, recorded 32"),
        ("max_position_embeddings", 128, "max_position_embeddings=128, recorded 64"),
    ],
)
def test_another_config_is_an_error_that_names_the_key(megatron: Path, key: str, value: object, expected: str) -> None:
    edit_json(megatron / "hf" / "config.json", **{key: value})
    assert expected in error_of(megatron)


def test_another_number_of_layers_is_an_error_that_names_the_key(megatron: Path) -> None:
    edit_json(megatron / "hf" / "config.json", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    assert "num_hidden_layers=2, recorded 3" in error_of(megatron)


def test_another_family_is_named(megatron: Path) -> None:
    edit_json(megatron / "hf" / "config.json", architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    message = error_of(megatron)
    assert "family=qwen2, recorded qwen3" in message and "qk_norm=False, recorded True" in message


def test_weights_without_a_record_are_converted_with_a_note(megatron: Path, tmp_path: Path, capsys) -> None:
    megatron_to_hf(megatron, tmp_path / "checked")
    assert "could not be checked" not in capsys.readouterr().err
    (megatron / "conversion.json").unlink()
    megatron_to_hf(megatron, tmp_path / "unchecked")
    config = megatron / "hf" / "config.json"
    note = f"{megatron} has no record of the model's arguments: {config} could not be checked against the weights"
    assert f"megasharp: note: {note}\n" in capsys.readouterr().err


def test_weights_of_several_dtypes_are_refused_unless_one_is_asked_for(megatron: Path) -> None:
    path = megatron / "policy" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    _replace(metadata, properties=torch.bfloat16)
    path.write_bytes(pickle.dumps(metadata))
    mixed = "decoder.layers.0.mlp.linear_fc1.weight in bfloat16 and embedding.word_embeddings.weight in float32"
    assert error_of(megatron).startswith(f"{megatron / 'policy'}: tensors {mixed}: have all")


def shard(megatron: Path) -> Path:
    return next((megatron / "policy").glob("*.distcp"))


def test_a_truncated_shard_is_named_with_a_tensor(megatron: Path) -> None:
    path = shard(megatron)
    path.write_bytes(path.read_bytes()[:-100])
    message = error_of(megatron)
    assert message.startswith(f"{path} is truncated: tensor ")


def test_a_missing_shard_is_named_with_a_tensor(megatron: Path) -> None:
    path = shard(megatron)
    path.unlink()
    assert error_of(megatron).startswith(f"{path} does not exist, but tensor ")


def test_a_changed_byte_is_named_by_its_tensor(megatron: Path) -> None:
    path, record = shard(megatron), read_record(megatron)
    assert record is not None
    norm = load_file(megatron.parent / "model" / "model.safetensors")["model.layers.1.input_layernorm.weight"]
    content, value = path.read_bytes(), norm.numpy().tobytes()
    assert content.count(value) == 1
    path.write_bytes(content.replace(value, bytes([value[0] ^ 1]) + value[1:]))
    message = error_of(megatron)
    assert "tensor model.layers.1.input_layernorm.weight is damaged" in message


def test_a_changed_byte_is_found_in_rounded_weights_too(save_model, tmp_path: Path) -> None:
    source, megatron = save_model("qwen3"), tmp_path / "megatron"
    hf_to_megatron(source, megatron, dtype="bfloat16")
    norm = load_file(source / "model.safetensors")["model.norm.weight"].bfloat16()
    path, value = shard(megatron), norm.view(torch.uint8).numpy().tobytes()
    content = path.read_bytes()
    assert content.count(value) == 1
    path.write_bytes(content.replace(value, bytes([value[0] ^ 1]) + value[1:]))
    assert "tensor model.norm.weight is damaged" in error_of(megatron)


def test_a_shard_of_rubbish_is_named_with_its_tensor(megatron: Path) -> None:
    path = shard(megatron)
    path.write_bytes(b"x" * path.stat().st_size)
    assert error_of(megatron).startswith(f"{path}: tensor embedding.word_embeddings.weight cannot be read")


@each_case(
    ("change", "expected"),
    [
        (lambda m: m.state_dict_metadata.pop(FC1), f"tensor {FC1} is missing"),
        (lambda m: m.state_dict_metadata.update(extra=m.state_dict_metadata[FC1]), "extra tensor extra"),
        (lambda m: _replace(m, properties=torch.int8), f"tensor {FC1} has dtype torch.int8"),
        (lambda m: _replace(m, size=torch.Size((3, 64, 25))), f"tensor {FC1} has shape (3, 64, 25)"),
        (lambda m: m.state_dict_metadata[FC1].chunks.pop(), f"tensor {FC1} is not complete"),
    ],
)
def test_a_wrong_table_of_contents_is_named_by_its_tensor(
    megatron: Path, change: Callable[[Any], object], expected: str
) -> None:
    path = megatron / "policy" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    message = error_of(megatron)
    assert expected in message and str(megatron / "policy") in message


def _replace(metadata: Any, properties: torch.dtype | None = None, size: torch.Size | None = None) -> None:
    stored = metadata.state_dict_metadata[FC1]
    if properties is not None:
        stored.properties.dtype = properties
    if size is not None:
        stored.size = size


def test_a_folder_that_is_none_is_refused(megatron: Path, tmp_path: Path) -> None:
    assert "not a torch_dist checkpoint" in _without(megatron / "policy" / ".metadata", megatron)
    assert "policy/ is missing" in error_of(tmp_path / "model")
    (megatron / "conversion.json").write_text("{}")
    assert f"{megatron / 'conversion.json'}: not a record of a conversion" in error_of(megatron)


def _without(path: Path, folder: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content[:50])
    message = error_of(folder)
    path.write_bytes(content)
    return message


def test_hugging_face_damage_leaves_no_megatron_folder(save_model) -> None:
    source = save_model("qwen3", shard=9000)
    index = source / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    name = "model.layers.1.mlp.up_proj.weight"
    path = source / listed[name]
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    assert error_of(source, hf_to_megatron).startswith(f"{path} is truncated")
    path.unlink()
    assert f"{index} names {path.name}, which does not exist" in error_of(source, hf_to_megatron)
    path.write_bytes(content)
    hf_to_megatron(source, source.parent / "megatron")


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Set how long a file may get, as a disk that fills up does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_line_and_leaves_nothing(save_model, tmp_path: Path, small_files) -> None:
    source = save_model("qwen3")
    hf_to_megatron(source, tmp_path / "megatron")
    small_files(20_000)
    assert error_of(source, hf_to_megatron).startswith(f"no space left for {tmp_path / 'result'}")
    assert error_of(tmp_path / "megatron").startswith(f"no space left for {tmp_path / 'result'}")


def test_values_that_are_no_numbers_are_copied_and_named(
    save_model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, first, second = save_model("qwen3"), "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    file = source / "model.safetensors"
    capsys.readouterr()
    tensors = load_file(file)
    tensors[first][3, 5], tensors[second][0] = float("nan"), 1e6
    save_file(tensors, file, metadata={"format": "pt"})
    hf_to_megatron(source, tmp_path / "megatron")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"megasharp: note: {file}: tensor {first}: values that are NaN or infinite; `megasharp train` refuses them"
    )
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"megasharp: note: {tmp_path / 'megatron' / 'policy'}: tensor {first}: values that are NaN")
    for name, tensor in load_file(tmp_path / "back" / "model.safetensors").items():
        assert torch.equal(tensor.view(torch.int32), tensors[name].view(torch.int32)), name
    megatron_to_hf(tmp_path / "megatron", tmp_path / "short", dtype="float16")
    (line,) = capsys.readouterr().err.splitlines()
    assert f"tensor {first} and 1 more: values that are NaN or infinite, or too large for its dtype in" in line
