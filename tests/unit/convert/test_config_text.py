"""Every wrong value of a config.json is one line with the file and the key, whatever transformers would say of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.convert.hf_folder import read_config
from megasharp.convert.rope import rotary_frequencies

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
SWITCHES = ("tie_word_embeddings", "use_sliding_window", "attention_bias")
ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LENGTH = {"original_max_position_embeddings": 16}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4.0, **LENGTH}
YARN = {**ROPE, "rope_type": "yarn", "beta_fast": 32, "mscale": 0.707, "mscale_all_dim": 0, "truncate": False, **LENGTH}
NO_NUMBERS = [None, "8", True, False, [], [8.0], {}, -1, math.nan, math.inf, 10**400]


def error_of(path: Path, **values: object) -> str:
    """What reading says, after the file's path, once these keys are set; None takes a key away."""
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in values}
    path.write_text(json.dumps({**kept, **{key: value for key, value in values.items() if value is not None}}))
    with pytest.raises(UserError) as caught:
        read_config(path.parent)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message.removeprefix(f"{path}: ")


@each_case("key", SIZES)
@each_case("value", [0, -1, "4", 2.5, True, [4]])
def test_sizes_are_whole_numbers(save_model, key: str, value: object) -> None:
    assert error_of(save_model() / "config.json", **{key: value}) == f"{key}={value!r} must be " + (
        "a whole number of at least 1"
    )


@each_case("key", SIZES)
def test_sizes_have_no_defaults(save_model, key: str) -> None:
    assert error_of(save_model() / "config.json", **{key: None}).startswith(f"{key} is missing")


@each_case("key", ["num_key_value_heads", "head_dim", "max_position_embeddings"])
@each_case("value", [0, "2"])
def test_sizes_with_defaults_are_checked_where_they_are_given(save_model, key: str, value: object) -> None:
    assert error_of(save_model() / "config.json", **{key: value}).startswith(f"{key}={value!r} must be a whole number")


@each_case("key", SWITCHES)
@each_case("value", ["yes", 1])
def test_switches_are_true_or_false(save_model, key: str, value: object) -> None:
    assert error_of(save_model() / "config.json", **{key: value}) == f"{key}={value!r} must be either true or false"


@each_case(
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
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf must be a positive number, such as 1e-06"),
        ({"rope_theta": 0}, "rope_theta=0 must be a number above 1, such as 10000.0"),
        ({"rope_parameters": {**ROPE, "other": "2"}}, "rope_parameters.other='2' must be a number"),
        ({"rope_scaling": {**ROPE, "factor": "2"}}, "rope_scaling.factor='2' must be a number of at least 1"),
        (
            {"original_max_position_embeddings": []},
            "original_max_position_embeddings=[] must be a whole number of at least 1",
        ),
        ({"dtype": []}, "dtype=[] must be a name, such as 'bfloat16', or null"),
        ({"dtype": float("nan")}, "dtype=nan must be a name, such as 'bfloat16', or null"),
        ({"torch_dtype": 16}, "torch_dtype=16 must be a name, such as 'bfloat16', or null"),
        ({"dtype": "float17"}, "dtype=float17 is none of torch's dtypes: name what the weights are stored in"),
    ],
)
def test_other_values_are_named_with_what_they_must_be(save_model, values: dict[str, object], message: str) -> None:
    assert error_of(save_model() / "config.json", **values) == message


@each_case(
    ("key", "wrong", "what"),
    [
        ("rope_theta", [0, 1], "a number above 1, such as 10000.0"),
        ("factor", [0, 0.5], "a number of at least 1"),
        ("low_freq_factor", [0], "a positive number"),
        ("high_freq_factor", [0], "a positive number"),
        ("original_max_position_embeddings", [0, 16.0], "a whole number of at least 1"),
    ],
)
def test_rotary_settings_that_give_no_frequencies_are_named(
    save_model, key: str, wrong: list[object], what: str
) -> None:
    path = save_model("llama", rope_parameters=LLAMA3) / "config.json"
    whole = key == "original_max_position_embeddings"
    for value in [value for value in (*NO_NUMBERS, *wrong) if not (whole and value == 10**400)]:
        message = error_of(path, rope_parameters={**LLAMA3, key: value})
        assert message == f"rope_parameters.{key}={value!r} must be {what}"


@each_case(
    ("key", "wrong", "what"),
    [
        ("beta_fast", [0, True, math.nan, []], "a positive number, or null"),
        ("beta_slow", [-1, "1"], "a positive number, or null"),
        ("attention_factor", [0, math.inf], "a positive number, or null"),
        ("mscale", [-1, math.nan, False], "a number of at least 0, or null"),
        ("mscale_all_dim", [-0.5, {}], "a number of at least 0, or null"),
        ("truncate", [None, 1], "either true or false"),
        ("partial_rotary_factor", [None, 0, True, []], "a positive number"),
    ],
)
def test_rotary_settings_with_defaults_are_checked_where_they_are_given(
    save_model, key: str, wrong: list[object], what: str
) -> None:
    path = save_model(rope_parameters=YARN) / "config.json"
    for value in wrong:
        assert error_of(path, rope_parameters={**YARN, key: value}) == f"rope_parameters.{key}={value!r} must be {what}"


@each_case("low", [4.0, 8])
def test_the_bounds_of_llamas_frequencies_are_in_order(save_model, low: float) -> None:
    path = save_model("llama", rope_parameters=LLAMA3) / "config.json"
    message = error_of(path, rope_parameters={**LLAMA3, "low_freq_factor": low})
    assert message == f"rope_parameters.high_freq_factor=4.0 must be greater than low_freq_factor={low!r}"


@each_case("rope", [ROPE, LLAMA3, YARN, {**YARN, "beta_fast": None, "attention_factor": None}])
def test_rotary_settings_that_are_right_are_read_as_they_stand(save_model, rope: dict[str, object]) -> None:
    _, _, arch = read_config(save_model("llama", rope_parameters=rope))
    assert arch.rope_parameters.as_dict() == rope
    frequencies, factor = rotary_frequencies(arch)
    assert frequencies.isfinite().all() and frequencies.min() > 0 and factor > 0


def test_a_llamas_heads_divide_its_hidden_size(save_model) -> None:
    path = save_model("llama") / "config.json"
    assert error_of(path, num_attention_heads=7) == "num_attention_heads=7 must divide hidden_size=24 in a Llama"
