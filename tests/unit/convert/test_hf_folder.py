"""Opening a checkpoint folder: what is read, and the one line for everything that can be wrong with it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from cases import each_case
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megasharp.common.errors import UserError
from megasharp.convert.hf_folder import HFReader, check_tokenizer, megatron_tensor, read_config

NORM = "model.layers.1.input_layernorm.weight"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def error_of(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        HFReader(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_weights_that_may_not_be_read_are_told_as_such(save_model, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model("qwen3")
    usual = Path.open

    def refuse(path: Path, *arguments: Any, **named: Any) -> IO[Any]:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return usual(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", refuse)
    assert error_of(folder) == f"{folder / 'model.safetensors'} cannot be read: Permission denied"


@each_case("shard", [None, 4000])
@each_case("tied", [True, False])
def test_reads_what_transformers_wrote(save_model, make_model, shard: int | None, tied: bool) -> None:
    folder = save_model("qwen3", shard=shard, tie_word_embeddings=tied)
    assert (folder / "model.safetensors.index.json").exists() == (shard is not None)
    expected = make_model("qwen3", tie_word_embeddings=tied).state_dict()
    with HFReader(folder) as reader:
        assert set(reader.names()) == expected.keys() - ({"lm_head.weight"} if tied else set())
        for name in reader.names():
            assert torch.equal(reader.tensor(name), expected[name])
        qkv = megatron_tensor(
            reader,
            reader.family,
            reader.architecture,
            "decoder.layers.0.self_attention.linear_qkv.weight",
            1,
            2,
        )
    # 2 query heads, a key and a value of 8 rows each; still readable with the file gone.
    (folder / "config.json").unlink()
    assert qkv.shape == (32, 24)


def test_opening_reads_no_data(save_model, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model("qwen3")

    def refuse(self: HFReader, name: str) -> Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(HFReader, "tensor", refuse)
    HFReader(folder).close()


def test_folder_and_config_errors(tmp_path: Path, save_model) -> None:
    assert error_of(tmp_path / "absent").endswith("absent is not a Hugging Face model folder: it does not exist")
    assert f"{tmp_path / 'config.json'} does not exist" in error_of(tmp_path)
    config = save_model() / "config.json"
    whole = config.read_text()
    config.write_text(whole[: len(whole) // 2])
    assert f"{config} cannot be read" in error_of(config.parent)
    config.write_text("[]")
    assert f"{config}: expected a table" in error_of(config.parent)
    config.write_text("{}")
    assert f"{config}: architectures=None" in error_of(config.parent)


def test_unsupported_architecture_names_the_supported_ones(save_model) -> None:
    folder = save_model()
    edit_json(folder / "config.json", architectures=["GPT2LMHeadModel"], model_type="gpt2")
    assert error_of(folder) == (
        f"{folder}/config.json: architecture GPT2LMHeadModel is not supported "
        "(supported: LlamaForCausalLM, MinistralForCausalLM, MistralForCausalLM, MixtralForCausalLM, "
        "Olmo2ForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM)"
    )
    edit_json(folder / "config.json", architectures=["Qwen2MoeForCausalLM"], num_experts=60)
    assert "architecture Qwen2MoeForCausalLM, a mixture of experts, is not supported (" in error_of(folder)


def test_missing_and_broken_weight_files(save_model) -> None:
    folder = save_model()
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for length in (0, 5, 200, len(data) - 1):
        path.write_bytes(data[:length])
        assert error_of(folder).startswith(f"{path} is truncated or not a safetensors file")
    path.unlink()
    assert error_of(folder).startswith(f"no safetensors weights in {folder}")


def test_index_errors(save_model) -> None:
    folder = save_model(shard=4000)
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map={**listed, NORM: next(f for n, f in listed.items() if f != listed[NORM])})
    assert f"tensor {NORM} is missing" in error_of(folder)
    edit_json(index, weight_map={name: file for name, file in listed.items() if name != NORM})
    HFReader(folder).close()
    edit_json(index, weight_map=listed)
    path, shared = folder / listed[NORM], [name for name, file in listed.items() if file == listed[NORM]]
    content = path.read_bytes()
    for length in (len(content) - 1, 20):
        path.write_bytes(content[:length])
        message = error_of(folder)
        assert message.startswith(f"{path} is truncated") and any(f"tensor {name} " in message for name in shared)
    path.unlink()
    message = error_of(folder)
    assert message.startswith(f"{index} names {path.name}, which does not exist, for tensor {shared[0]}")
    index.write_text("{")
    assert f"{index} cannot be read" in error_of(folder)


def test_a_file_that_is_cut_short_names_a_tensor_behind_its_end(save_model) -> None:
    path = save_model() / "model.safetensors"
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    path.write_bytes(content[:-1])
    assert f", so tensor {last} cannot be read: " in error_of(path.parent)


def test_a_tensor_in_no_file_names_where_it_was_looked_for(save_model) -> None:
    folder = save_model()
    rewrite(folder, lambda t: t.pop(NORM))
    asked = f"{folder / 'config.json'} asks for it"
    assert error_of(folder) == f"tensor {NORM} is missing from {folder / 'model.safetensors'}: {asked}"
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "one.safetensors"}}))
    assert error_of(folder) == f"tensor {NORM} is missing from {index} and the files that it names: {asked}"


def test_a_tensor_in_two_files_names_both(save_model) -> None:
    folder = save_model(shard=4000)
    listed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = folder / next(file for file in sorted(set(listed.values())) if file != listed[NORM])
    save_file({**load_file(other), NORM: torch.ones(24)}, other, metadata={"format": "pt"})
    one, two = sorted([folder / listed[NORM], other])
    assert error_of(folder).startswith(f"tensor {NORM} is in {one} and in {two}")


@each_case(
    ("change", "expected"),
    [
        (lambda t: t.pop(NORM), f"tensor {NORM} is missing from"),
        (lambda t: t.update({"model.layers.3.x": torch.ones(2)}), "extra tensor model.layers.3.x"),
        (lambda t: t.update({NORM: torch.ones(25)}), f"tensor {NORM} has shape (25,)"),
        (lambda t: t.update({NORM: torch.ones(24, dtype=torch.int8)}), f"tensor {NORM} has dtype I8"),
    ],
)
def test_tensor_errors(save_model, change: Callable[[dict[str, Tensor]], object], expected: str) -> None:
    folder = save_model()
    rewrite(folder, change)
    message = error_of(folder)
    assert expected in message
    assert str(folder) in message


LAYER = "model.layers.0."


@each_case(
    ("family", "key", "value", "tensor", "asked"),
    [
        ("qwen3", "vocab_size", 7, "model.embed_tokens.weight has shape (53, 24)", "(7, 24) by vocab_size=7"),
        ("qwen3", "hidden_size", 7, "model.embed_tokens.weight has shape (53, 24)", "(53, 7) by hidden_size=7"),
        (
            "qwen3",
            "intermediate_size",
            7,
            f"{LAYER}mlp.gate_proj.weight has shape (32, 24)",
            "(7, 24) by intermediate_size=7",
        ),
        (
            "qwen3",
            "num_attention_heads",
            8,
            f"{LAYER}self_attn.q_proj.weight has shape (32, 24)",
            "(64, 24) by num_attention_heads=8 x head_dim=8",
        ),
        (
            "llama",
            "num_key_value_heads",
            None,
            f"{LAYER}self_attn.k_proj.weight has shape (12, 24)",
            "(24, 24) by num_key_value_heads=4 x head_dim=6",
        ),
        (
            "qwen3",
            "head_dim",
            4,
            f"{LAYER}self_attn.q_proj.weight has shape (32, 24)",
            "(16, 24) by num_attention_heads=4 x head_dim=4",
        ),
    ],
)
def test_a_shape_that_config_json_does_not_ask_for_names_its_keys(
    save_model, family: str, key: str, value: object, tensor: str, asked: str
) -> None:
    folder = save_model(family)
    edit_json(folder / "config.json", **{key: value})
    message = f"tensor {tensor}, but {folder / 'config.json'} asks for {asked}"
    assert error_of(folder) == f"{folder / 'model.safetensors'}: {message}"


@each_case("shape", [(24,), (53, 24, 1)])
def test_a_shape_of_another_rank_names_all_keys(save_model, shape: tuple[int, ...]) -> None:
    folder = save_model()
    rewrite(folder, lambda t: t.update({"model.embed_tokens.weight": torch.ones(shape)}))
    assert error_of(folder).endswith(" asks for (53, 24) by vocab_size=53, hidden_size=24")


def test_tensors_that_a_key_asks_for_or_does_not_name_it(save_model) -> None:
    folder = save_model(tie_word_embeddings=True)
    config = folder / "config.json"
    edit_json(config, tie_word_embeddings=False)
    assert error_of(folder).endswith(f"{config} asks for it (tie_word_embeddings=false)")
    edit_json(config, tie_word_embeddings=True, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    message = error_of(folder)
    assert message.startswith("tensor model.layers.3.") and message.endswith(" asks for it (num_hidden_layers=4)")
    edit_json(config, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    message = error_of(folder)
    assert "extra tensor model.layers.2." in message and message.endswith(" does not have (num_hidden_layers=2)")


def test_spare_head_of_a_tied_model(save_model) -> None:
    folder = save_model(tie_word_embeddings=True)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    with HFReader(folder) as reader:
        assert "lm_head.weight" not in reader.names()
    rewrite(folder, lambda t: t["lm_head.weight"].add_(1))
    assert "set tie_word_embeddings=false" in error_of(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": torch.ones(52, 24)}))
    assert "extra tensor lm_head.weight" in error_of(folder)


def save_tokenizer(folder: Path, size: int) -> None:
    vocabulary = {f"t{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)


def test_tokenizer_must_fit_the_vocabulary(save_model) -> None:
    folder = save_model()
    _, _, arch = read_config(folder)
    with pytest.raises(UserError, match="no tokenizer in"):
        check_tokenizer(folder, arch)
    save_tokenizer(folder, 53)
    check_tokenizer(folder, arch)
    save_tokenizer(folder, 54)
    with pytest.raises(UserError, match=r"tokenizer/model vocabulary mismatch: token 't53' .* id 53") as caught:
        check_tokenizer(folder, arch)
    assert "vocab_size=53" in str(caught.value)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read") as caught:
        check_tokenizer(folder, arch)
    assert "\n" not in str(caught.value)


def test_added_tokens_count_too(save_model) -> None:
    folder = save_model()
    _, _, arch = read_config(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"t{i}": i for i in range(53)}, unk_token="t0"))
    )
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="'<pad>'"):
        check_tokenizer(folder, arch)
