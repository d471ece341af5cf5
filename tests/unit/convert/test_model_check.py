"""A built GPTModel against the text of config.json: what a family's table reads wrongly is found, by its key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.convert.architecture import RopeParameters
from megasharp.convert.hf_folder import read_config
from megasharp.learner.meta_models import alone, blank_model
from megasharp.learner.model_check import check_model


def check(folder: Path, **misread: object) -> None:
    """Build the model as if the family's table had read those fields wrongly."""
    _, _, arch = read_config(folder)
    arch = dataclasses.replace(arch, **misread)
    with alone() as place:
        check_model(blank_model(arch, place, torch.float32), arch, folder / "config.json")


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@each_case(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("mistral", {"sliding_window": 8}),
        ("mistral", {"sliding_window": None}),
        ("ministral", {"sliding_window": 8, "layer_types": KINDS}),
        ("olmo2", {}),
    ],
)
def test_the_families_are_read_rightly(save_model, family: str, settings: dict[str, object]) -> None:
    check(save_model(family, **settings))


def test_windows_without_layer_types_are_read_from_the_older_keys(save_model) -> None:
    folder = save_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    path = folder / "config.json"
    older = {key: value for key, value in json.loads(path.read_text()).items() if key != "layer_types"}
    path.write_text(json.dumps(older))
    check(folder)
    with pytest.raises(UserError, match=r"windows .*=\[None, 8, 8\] but the Megatron model has \[8, 8, 8\]"):
        check(folder, windows=(8, 8, 8))


@each_case(
    ("family", "settings", "left_out"),
    [
        ("mistral", {"sliding_window": 4096}, ["sliding_window"]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4096}, ["layer_types", "max_window_layers"]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, ["layer_types", "sliding_window"]),
        ("ministral", {"sliding_window": 4096, "layer_types": KINDS}, ["sliding_window"]),
        ("mistral", {"sliding_window": 4096}, ["rms_norm_eps", "max_position_embeddings", "hidden_act"]),
    ],
)
def test_keys_left_to_transformers_defaults_are_no_contradiction(
    save_model, family: str, settings: dict[str, object], left_out: list[str]
) -> None:
    path = save_model(family, **settings) / "config.json"
    text = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in text.items() if key not in left_out}))
    check(path.parent)


@each_case(
    ("field", "value", "key"),
    [
        ("num_layers", 4, "num_hidden_layers=3 but the Megatron model has 4"),
        ("hidden", 48, "hidden_size=24"),
        ("heads", 2, "num_attention_heads=4"),
        ("kv_heads", 4, "num_key_value_heads=2"),
        ("head_dim", 6, "head_dim=8"),
        ("ffn", 64, "intermediate_size=32"),
        ("vocab", 54, "vocab_size=53"),
        ("norm_eps", 1e-5, "rms_norm_eps=1e-06"),
        ("tied", True, "tie_word_embeddings=False"),
        ("qkv_bias", True, "attention_bias=False"),
        ("qk_norm", False, "qk_norm=True"),
        ("qk_norm_whole", True, "qk_norm_whole=False but the Megatron model has True"),
        ("post_norm", True, "post_norm=False but the Megatron model has True"),
        ("max_positions", 65, "max_position_embeddings=64"),
        ("windows", (4, None, None), "windows (sliding_window, layer_types)=[None, None, None]"),
        ("rope_parameters", RopeParameters(1e6), "rope_theta=10000.0"),
        ("rope_parameters", RopeParameters(1e4, "linear", (("factor", 2.0),)), "rope_type=default"),
    ],
)
def test_each_argument_that_is_read_wrongly_is_named(save_model, field: str, value: object, key: str) -> None:
    folder = save_model("qwen3")
    with pytest.raises(UserError) as caught:
        check(folder, **{field: value})
    assert key in str(caught.value)
    assert str(caught.value).startswith(f"{folder / 'config.json'}: ")


@each_case("field", ["qk_norm_whole", "post_norm"])
def test_norms_in_another_place_are_found(save_model, field: str) -> None:
    with pytest.raises(UserError, match=f"{field}=True but the Megatron model has False"):
        check(save_model("olmo2"), **{field: False})


def test_rope_settings_are_compared_one_by_one(save_model) -> None:
    scaling = {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    folder = save_model("qwen3", rope_parameters=scaling)
    check(folder)
    misread = RopeParameters(1000.0, "yarn", (("factor", 2.0), ("original_max_position_embeddings", 16)))
    with pytest.raises(UserError, match=r"rope_scaling.factor=4.0 but the Megatron model has 2.0"):
        check(folder, rope_parameters=misread)


def test_an_older_config_keeps_its_rope_elsewhere(save_model) -> None:
    folder = save_model("qwen2")
    path = folder / "config.json"
    text = path.read_text()
    start = text.index('"rope_parameters"')
    end = text.index("}", start) + 2
    path.write_text(text[:start] + '"rope_theta": 500000.0,' + text[end:])
    check(folder)
    with pytest.raises(UserError, match=r"rope_theta=500000.0 but the Megatron model has 10000.0"):
        check(folder, rope_parameters=RopeParameters(10000.0))
