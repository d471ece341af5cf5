"""`verify`: equal folders are equal, and whatever differs is found where it differs."""

from __future__ import annotations

import json
import math
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each_case
from safetensors.torch import load_file, save_file
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.learner.conversion import hf_to_megatron, megatron_to_hf
from megasharp.learner.verification import Probe, Verification, verify
from tests.unit.families import CLASSES

PROBE = Probe(tokens=24)
DOWN = "model.layers.1.mlp.down_proj.weight"


def changed(
    source: Path, change: Callable[[dict[str, Tensor]], object], name: str = "changed", **config: object
) -> Path:
    """A copy of the model with other weights or another config."""
    folder = source.parent / name
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {**json.loads((source / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def text(found: Verification) -> str:
    return "\n".join(found.lines)


# Every family, every other one with its head tied to the embedding.
TIED = {family: bool(number % 2) for number, family in enumerate(CLASSES)}


@each_case(("family", "tied"), TIED.items())
def test_a_converted_model_is_the_same_to_the_logits(save_model, tmp_path: Path, family: str, tied: bool) -> None:
    assert_converted(save_model, tmp_path, family, tied)


@pytest.mark.long("ranks")
@each_case(("family", "tied"), [(family, not tied) for family, tied in TIED.items()])
def test_a_converted_model_of_the_other_head_too(save_model, tmp_path: Path, family: str, tied: bool) -> None:
    assert_converted(save_model, tmp_path, family, tied)


def assert_converted(save_model, tmp_path: Path, family: str, tied: bool) -> None:
    # Shorter than the sequences, where a family has windows.
    source = save_model(family, tie_word_embeddings=tied, sliding_window=5)
    hf_to_megatron(source, tmp_path / "megatron")
    found = verify(source, tmp_path / "megatron", PROBE)
    assert found.equal, text(found)
    assert "logits of random sequences of 24, 12 tokens in float32" in text(found)
    assert found.lines[0] == f"A: {source} (Hugging Face, float32)"
    assert found.lines[1] == f"B: {tmp_path / 'megatron'} (Megatron, float32)"
    assert found.lines[-1] == "equal" and found.exit_code == 0


@each_case("dtype", ["bfloat16", "float16"])
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
        assert f"layer 1: {DOWN}: SHA-256 " in text(found)
        assert "first difference by layer: layer 1," in text(found)
        assert found.lines[-1] == "different"


def test_differences_come_layer_by_layer_and_once(save_model) -> None:
    source = save_model("qwen3")
    other = changed(source, lambda t: [tensor.add_(1) for name, tensor in t.items() if "norm" in name])
    lines = verify(source, other, PROBE).lines
    # Four norms in each of three layers, and one behind them.
    starts = [f"layer {n}: model.layers.{n}.input_layernorm.weight: SHA-256 " for n in range(3)]
    ends = [", and 3 more of its tensors"] * 3
    for line, start, end in zip(
        lines[3:], [*starts, "behind the layers: model.norm.weight: "], [*ends, ""], strict=False
    ):
        assert line.startswith(start) and line.endswith(end), line
    assert lines[7] == "36 tensors: 23 equal in name, shape, dtype and SHA-256, 13 different"
    assert max(map(len, lines[3:])) < 150


def test_no_more_than_five_places_are_shown(save_model) -> None:
    source = save_model("qwen3", num_hidden_layers=6)
    other = changed(source, lambda t: [tensor.add_(1) for tensor in t.values()])
    lines = verify(source, other, None).lines
    places = ["embedding", "layer 0", "layer 1", "layer 2", "layer 3"]
    assert [line.split(":")[0] for line in lines[3:8]] == places
    # Two layers, and what is behind them.
    assert lines[8] == "more places with differences: 3"


def test_a_change_too_small_for_the_logits_is_found_by_its_bytes(save_model) -> None:
    source = save_model("qwen3")
    other = changed(source, lambda t: t[DOWN][0, 0].add_(1e-6))
    found = verify(source, other, PROBE)
    assert not found.equal and f"layer 1: {DOWN}: SHA-256 " in text(found)
    assert "first difference by layer" not in text(found)


def test_arguments_that_no_tensor_shows_are_compared(save_model) -> None:
    source = save_model("qwen3")
    rope = {"rope_type": "default", "rope_theta": 100.0}
    other = changed(source, lambda t: None, rope_parameters=rope)
    found = verify(source, other, PROBE)
    assert not found.equal
    assert "argument rope_theta: 10000.0 in A, 100.0 in B" in text(found)
    assert "first difference by layer: layer 0," in text(found)


def test_names_shapes_and_dtypes_are_compared(save_model) -> None:
    source = save_model("qwen3", tie_word_embeddings=True)
    untied = changed(
        source,
        lambda t: t.update({"lm_head.weight": torch.zeros(53, 24), DOWN: t[DOWN].double() + 1}),
        tie_word_embeddings=False,
    )
    found = text(verify(source, untied, PROBE))
    assert "behind the layers: lm_head.weight: missing from A" in found
    assert f"layer 1: {DOWN}: float32 in A, float64 in B, and other values" in found
    assert "logits: not compared, the models have other shapes" in found


@each_case("dtype", ["bfloat16", "float16"])
def test_a_rounded_model_is_told_from_another(save_model, tmp_path: Path, dtype: str) -> None:
    source, rounded, back = save_model("qwen3"), tmp_path / "rounded", tmp_path / "back"
    hf_to_megatron(source, rounded, dtype=dtype)
    megatron_to_hf(rounded, back)
    for one, other in ((source, rounded), (back, source)):
        found = verify(one, other, PROBE)
        assert (found.outcome, found.exit_code) == ("rounded", 3), text(found)
        assert f"36 tensors: 36 with the same values after rounding to {dtype}" in found.lines
        assert found.lines[-1] == f"equal after rounding to {dtype}"
        assert "first difference by layer" not in text(found)
    assert verify(rounded, back, PROBE).equal


@each_case(("stored", "asked"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_dtypes_of_one_size_are_rounded_either_way(save_model, tmp_path: Path, stored: str, asked: str) -> None:
    source = save_model("qwen3", dtype=stored)
    hf_to_megatron(source, tmp_path / "megatron", dtype=asked)
    for sides in ((source, tmp_path / "megatron"), (tmp_path / "megatron", source)):
        found = verify(*sides, PROBE)
        assert found.outcome == "rounded", text(found)
        assert "36 with the same values after rounding to" in text(found)


def test_a_change_among_rounded_weights_is_found_by_its_name_and_layer(save_model, tmp_path: Path) -> None:
    source = save_model("qwen3")
    other = changed(source, lambda t: t[DOWN].mul_(1.5))
    hf_to_megatron(other, tmp_path / "rounded", dtype="bfloat16")
    found = verify(source, tmp_path / "rounded", PROBE)
    assert (found.outcome, found.exit_code) == ("different", 1)
    assert f"layer 1: {DOWN}: float32 in A, bfloat16 in B, and other values, however it is rounded" in found.lines
    assert "36 tensors: 35 with the same values after rounding to bfloat16, 1 different" in found.lines
    assert "first difference by layer: layer 1," in text(found)


def set_value(name: str, at: int, value: float) -> Callable[[dict[str, Tensor]], object]:
    """Changes the tensor's value `at` this place of its flat values."""
    return lambda tensors: tensors[name].view(-1)[at].fill_(value)


@each_case(
    ("name", "value", "compared"),
    [
        (DOWN, math.nan, "in float32: not compared, none is finite in both models"),
        (DOWN, math.inf, "in float32: not compared, none is finite in both models"),
        # A token's row of the head: its logit, of each of 36 tokens.
        ("lm_head.weight", -math.inf, "; 36 of 1908 are NaN or infinite and were not compared"),
    ],
)
def test_weights_that_are_no_numbers_are_equal_to_their_copy(
    save_model, tmp_path: Path, name: str, value: float, compared: str
) -> None:
    source = changed(save_model("qwen3"), set_value(name, 50, value))
    hf_to_megatron(source, tmp_path / "megatron")
    for sides in ((source, tmp_path / "megatron"), (tmp_path / "megatron", source)):
        found = verify(*sides, PROBE)
        assert (found.outcome, found.exit_code) == ("equal", 0), text(found)
        assert compared in text(found)


def test_a_nan_that_a_kernel_spreads_further_is_no_difference(save_model, tmp_path: Path) -> None:
    # Of a token that windows and the causal mask hide: transformers' attention makes NaN of it all the same.
    tokens = torch.randint(0, 53, (24,), generator=torch.Generator().manual_seed(0))
    row = int(tokens[-1])
    source = changed(
        save_model("mistral", sliding_window=5), set_value("model.embed_tokens.weight", row * 24, math.nan)
    )
    hf_to_megatron(source, tmp_path / "megatron")
    found = verify(source, tmp_path / "megatron", PROBE)
    assert found.equal, text(found)
    left_out = int(re.search(r"; (\d+) of 1908 are NaN", text(found))[1])
    assert 53 <= left_out < 1908


def test_numbers_beside_a_nan_are_compared(save_model) -> None:
    source = changed(save_model("qwen3"), set_value("lm_head.weight", 50, math.nan))
    rope = {"rope_type": "default", "rope_theta": 100.0}
    other = changed(source, lambda t: None, "other", rope_parameters=rope)
    found = verify(source, other, PROBE)
    assert "first difference by layer: layer 0," in text(found) and found.exit_code == 1


def test_a_nan_in_one_model_only_is_found_by_its_layer(save_model) -> None:
    source = save_model("qwen3")
    other = changed(source, set_value(DOWN, 50, math.nan))
    for sides in ((source, other), (other, source)):
        found = verify(*sides, PROBE)
        where = "NaN or infinite values in one model where the other has numbers"
        assert f"first difference by layer: layer 1, {where}" in found.lines
        assert found.exit_code == 1


def test_a_model_that_overflows_where_the_other_does_not_is_another(
    save_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_model("qwen3")
    given = iter([torch.ones(36, 53), torch.ones(36, 53).index_fill(0, torch.tensor([3]), math.inf)])
    monkeypatch.setattr("megasharp.learner.verification.transformers_outputs", lambda *_: {"logits": next(given)})
    found = verify(source, source, PROBE)
    assert found.outcome == "different" and "53 of 1908 are NaN or infinite and were not compared" in text(found)


def test_one_model_is_let_go_before_the_other_is_loaded(
    save_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_model("qwen3")
    hf_to_megatron(source, tmp_path / "megatron")
    alive: list[weakref.ref[torch.nn.Module]] = []
    held: list[int] = []
    register = torch.nn.Module.register_forward_hook

    def watched(module: torch.nn.Module, *arguments: Any) -> object:
        if not any(seen() is module for seen in alive):
            held.append(sum(seen() is not None for seen in alive))
            alive.append(weakref.ref(module))
        return register(module, *arguments)

    monkeypatch.setattr(torch.nn.Module, "register_forward_hook", watched)
    verify(source, tmp_path / "megatron", PROBE)
    # Embedding, three layers, norm and head of each model are watched; never more than one model's are alive.
    assert held == [*range(6), *range(6)]


def test_without_logits_no_model_is_loaded(save_model, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model("qwen3")
    monkeypatch.setattr("megasharp.learner.verification.transformers_outputs", None)
    found = verify(source, source, None)
    assert found.equal and "logits: not compared" in text(found)


def test_what_cannot_be_read_is_a_users_mistake(save_model, tmp_path: Path) -> None:
    source = save_model("qwen3")
    with pytest.raises(UserError, match="neither a Hugging Face folder nor a Megatron checkpoint folder"):
        verify(source, tmp_path / "absent", None)
    with pytest.raises(UserError, match="--tokens 1"):
        verify(source, source, Probe(tokens=1))
