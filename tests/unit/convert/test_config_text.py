"""Every wrong value of a config.json is one line with the file and the key, whatever transformers would say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megasharp.convert.hf_folder import read_config
from megasharp.errors import UserError

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
SWITCHES = ("tie_word_embeddings", "use_sliding_window", "attention_bias")
ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def error_of(path: Path, **values: object) -> str:
    """What reading says, after the file's path, once these keys are set; None takes a key away."""
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in values}
    path.write_text(json.dumps({**kept, **{key: value for key, value in values.items() if value is not None}}))
    with pytest.raises(UserError) as caught:
        read_config(path.parent)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [0, -1, "4", 2.5, True, [4]])
def test_sizes_are_whole_numbers(save_model, key: str, value: object) -> None:
    assert error_of(save_model() / "config.json", **{key: value}) == f"{key}={value!r} must be " + (
        "a whole number of at least 1"
    )


@pytest.mark.parametrize("key", SIZES)
def test_sizes_have_no_defaults(save_model, key: str) -> None:
    assert error_of(save_model() / "config.json", **{key: None}).startswith(f"{key} is missing")


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, "2"])
def test_sizes_with_defaults_are_checked_where_they_are_given(save_model, key: str, value: object) -> None:
    assert error_of(save_model() / "config.json", **{key: value}).startswith(f"{key}={value!r} must be a whole number")


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", ["yes", 1])
def test_switches_are_true_or_false(save_model, key: str, value: object) -> None:
    assert error_of(save_model() / "config.json", **{key: value}) == f"{key}={value!r} must be either true or false"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": None}, "model_type is missing: architecture Qwen3ForCausalLM's is qwen3"),
        ({"model_type": "gpt"}, "model_type=gpt is not architecture Qwen3ForCausalLM's (expected: qwen3)"),
        ({"model_type": 3}, "model_type=3 is not architecture Qwen3ForCausalLM's (expected: qwen3)"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small' must be a positive number, such as 1e-06"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 must be a positive number, such as 1e-06"),
        ({"hidden_act": 3}, "hidden_act=3 must be a name, such as 'silu'"),
        ({"sliding_window": "wide"}, "sliding_window='wide' must be a whole number, or null"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention' must be a list of names, one for each layer"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries for num_hidden_layers=3: it must have one for each layer",
        ),
        ({"rope_parameters": 3}, "rope_parameters=3 must be a table, or null"),
        ({"rope_parameters": {**ROPE, "rope_theta": "x"}}, "rope_parameters.rope_theta='x' must be a number"),
        ({"rope_parameters": {**ROPE, "factor": "2"}}, "rope_parameters.factor='2' must be a number"),
        ({"rope_scaling": {**ROPE, "factor": "2"}}, "rope_scaling.factor='2' must be a number"),
    ],
)
def test_other_values_are_named_with_what_they_must_be(save_model, values: dict[str, object], message: str) -> None:
    assert error_of(save_model() / "config.json", **values) == message
