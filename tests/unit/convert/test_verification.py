"""`verify`: equal folders are equal, and whatever differs is found where it differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megasharp.errors import UserError
from megasharp.mcore.conversion import hf_to_megatron
from megasharp.mcore.verification import Probe, Verification, verify

PROBE = Probe(tokens=24)
DOWN = "model.layers.1.mlp.down_proj.weight"


def changed(source: Path, change: Callable[[dict[str, Tensor]], object], **config: object) -> Path:
    """A copy of the model with other weights or another config."""
    folder = source.parent / "changed"
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {**json.loads((source / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def text(found: Verification) -> str:
    return "\n".join(found.lines)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "ministral"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_is_the_same_to_the_logits(save_model, tmp_path: Path, family: str, tied: bool) -> None:
    # Shorter than the sequences, where a family has windows.
    source = save_model(family, tie_word_embeddings=tied, sliding_window=5)
    hf_to_megatron(source, tmp_path / "megatron")
    found = verify(source, tmp_path / "megatron", PROBE)
    assert found.equal, text(found)
    assert "logits of random sequences of 24, 12 tokens in float32" in text(found)
    assert found.lines[-1] == "equal"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shorter_dtypes_have_tolerances_of_their_own(save_model, tmp_path: Path, dtype: str) -> None:
    source = save_model("qwen3", dtype=dtype, initializer_range=0.02)
    hf_to_megatron(source, tmp_path / "megatron")
    for computed in (dtype, "float32"):
        found = verify(source, tmp_path / "megatron", Probe(24, 0, computed))
        assert found.equal, text(found)


def test_a_changed_weight_is_found_by_its_name_and_layer(save_model, tmp_path: Path) -> None:
    source = save_model("qwen3")
    hf_to_megatron(source, tmp_path / "megatron")
    other = changed(source, lambda t: t[DOWN].mul_(1.5))
    for one in (source, tmp_path / "megatron"):
        found = verify(one, other, PROBE)
        assert not found.equal
        assert f"tensor {DOWN}: sha256 " in text(found)
        assert "first difference by layer: layer 1," in text(found)
        assert found.lines[-1] == "different"


def test_differences_come_layer_by_layer_and_once(save_model) -> None:
    source = save_model("qwen3")
    other = changed(source, lambda t: [tensor.add_(1) for name, tensor in t.items() if "norm" in name])
    lines = verify(source, other, PROBE).lines
    tensors = [line.split(":")[0].removeprefix("tensor ") for line in lines if line.startswith("tensor ")]
    assert [name.split(".")[2] for name in tensors] == ["0", "0", "0", "0", "1"]
    # Four norms in each of three layers, and one behind them.
    assert "and 8 more tensors" in lines
    assert len(lines) == len(set(lines))


def test_a_change_too_small_for_the_logits_is_found_by_its_bytes(save_model) -> None:
    source = save_model("qwen3")
    other = changed(source, lambda t: t[DOWN][0, 0].add_(1e-6))
    found = verify(source, other, PROBE)
    assert not found.equal and f"tensor {DOWN}: sha256 " in text(found)
    assert "first difference by layer" not in text(found)


def test_arguments_that_no_tensor_shows_are_compared(save_model) -> None:
    source = save_model("qwen3")
    rope = {"rope_type": "default", "rope_theta": 100.0}
    other = changed(source, lambda t: None, rope_parameters=rope)
    found = verify(source, other, PROBE)
    assert not found.equal
    assert f"argument rope_theta: 10000.0 in {source}, 100.0 in {other}" in text(found)
    assert "first difference by layer: layer 0," in text(found)


def test_names_shapes_and_dtypes_are_compared(save_model) -> None:
    source = save_model("qwen3", tie_word_embeddings=True)
    untied = changed(
        source,
        lambda t: t.update({"lm_head.weight": torch.zeros(53, 24), DOWN: t[DOWN].double()}),
        tie_word_embeddings=False,
    )
    found = text(verify(source, untied, PROBE))
    assert f"tensor lm_head.weight: missing from {source}" in found
    assert f"tensor {DOWN}: dtype float32 in {source}, float64 in {untied}" in found
    assert "logits: not compared, the models have other shapes" in found


def test_without_logits_no_model_is_loaded(save_model, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model("qwen3")
    monkeypatch.setattr("megasharp.mcore.verification.transformers_outputs", None)
    found = verify(source, source, None)
    assert found.equal and "logits: not compared" in text(found)


def test_what_cannot_be_read_is_a_users_mistake(save_model, tmp_path: Path) -> None:
    source = save_model("qwen3")
    with pytest.raises(UserError, match="neither a Hugging Face folder nor a Megatron checkpoint folder"):
        verify(source, tmp_path / "absent", None)
    with pytest.raises(UserError, match="--tokens 1"):
        verify(source, source, Probe(tokens=1))
