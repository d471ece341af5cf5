"""What is read from config.json, what is refused, and which layouts a model can be cut by."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.convert.architecture import Architecture, RopeParameters
from megasharp.convert.families import FAMILIES
from megasharp.convert.hf_folder import read_config
from tests.unit.families import CLASSES


@each_case("tied", [True, False])
@each_case("family", CLASSES)
def test_parameter_count_equals_transformers(make_model, family: str, tied: bool) -> None:
    model = make_model(family, tie_word_embeddings=tied)
    arch = FAMILIES[type(model).__name__].architecture(model.config)
    assert arch.parameter_count() == sum(p.numel() for p in model.parameters())


def test_every_field_is_read(save_model) -> None:
    folder = save_model("qwen3", rms_norm_eps=1e-5, tie_word_embeddings=True, dtype="bfloat16")
    _, family, arch = read_config(folder)
    assert family is FAMILIES["Qwen3ForCausalLM"]
    assert arch == Architecture(
        family="qwen3",
        num_layers=3,
        hidden=24,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn=32,
        vocab=53,
        norm_eps=1e-5,
        rope_parameters=RopeParameters(10_000.0),
        max_positions=64,
        tied=True,
        qkv_bias=False,
        qk_norm=True,
        dtype="bfloat16",
    )
    assert arch.folder == str(folder)


def test_qwen2_derives_head_dim_and_has_biases(save_model) -> None:
    _, _, arch = read_config(save_model("qwen2"))
    assert (arch.head_dim, arch.qkv_bias, arch.qk_norm, arch.dtype) == (6, True, False, "float32")


def test_olmo2_has_its_norms_behind_and_over_all_heads(save_model) -> None:
    _, _, arch = read_config(save_model("olmo2"))
    assert (arch.head_dim, arch.qk_norm, arch.qk_norm_whole, arch.post_norm) == (6, False, True, True)


PATTERN = ["full_attention", "sliding_attention", "sliding_attention"]


@each_case(
    ("family", "overrides", "windows"),
    [
        ("mistral", {"sliding_window": 7}, (7, 7, 7)),
        ("mistral", {"sliding_window": None}, ()),
        ("ministral", {"sliding_window": 7, "layer_types": PATTERN}, (None, 7, 7)),
        ("ministral", {"sliding_window": 7}, (7, 7, 7)),
        ("ministral", {"sliding_window": None}, ()),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": PATTERN}, (None, 8, 8)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, ()),
        ("llama", {"sliding_window": 8}, ()),
    ],
)
def test_windows_are_what_transformers_attends_with(
    save_model, family: str, overrides: dict[str, object], windows: tuple[int | None, ...]
) -> None:
    _, _, arch = read_config(save_model(family, **overrides))
    assert arch.windows == windows
    assert [arch.window(layer) for layer in range(3)] == list(windows or (None,) * 3)
    assert arch.smallest_window == ({8, 7} & set(windows) or {None}).pop()


def test_a_mistral_whose_config_names_kinds_of_layers_has_them(save_model) -> None:
    """transformers reads such a config as Ministral's; Ministral-8B is published as MistralForCausalLM."""
    from transformers import AutoModelForCausalLM

    folder = save_model("ministral", sliding_window=7, layer_types=PATTERN)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    del stored["rope_parameters"]
    published = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "rope_theta": 1e8}
    path.write_text(json.dumps({**stored, **published}))
    _, family, arch = read_config(folder)
    assert arch.rope_parameters == RopeParameters(1e8)
    assert (family.hf_name, arch.windows) == ("MistralForCausalLM", (None, 7, 7))
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "MinistralForCausalLM"


def test_architecture_travels_to_other_processes(save_model) -> None:
    _, family, arch = read_config(save_model("qwen3"))
    assert pickle.loads(pickle.dumps(arch)) == arch
    assert pickle.loads(pickle.dumps(family)).rules == family.rules


@each_case(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_settings_suffice_for_the_frequencies(make_model, rope: dict[str, float | str]) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = make_model("qwen3", rope_parameters=rope)
    arch = FAMILIES["Qwen3ForCausalLM"].architecture(model.config)
    again = Qwen3Config(
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_key_value_heads=arch.kv_heads,
        head_dim=arch.head_dim,
        intermediate_size=arch.ffn,
        num_hidden_layers=1,
        vocab_size=8,
        max_position_embeddings=arch.max_positions,
        rope_parameters=arch.rope_parameters.as_dict(),
    )
    rebuilt = Qwen3ForCausalLM(again).model.rotary_emb
    torch.testing.assert_close(rebuilt.inv_freq, model.model.rotary_emb.inv_freq, rtol=0, atol=0)
    assert rebuilt.attention_scaling == model.model.rotary_emb.attention_scaling


def test_list_valued_rope_settings_come_back_as_lists() -> None:
    rope = RopeParameters(1e4, "longrope", (("short_factor", (1.0, 2.0)),))
    assert rope.as_dict() == {"rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0, 2.0]}


@each_case(
    ("family", "overrides", "names"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types=['chunked_attention']"),
        ("ministral", {"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "sliding_window=None"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("olmo2", {"attention_bias": True}, "attention_bias=True"),
        ("olmo2", {"head_dim": 8}, "head_dim=8"),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
        ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_unsupported_settings_are_refused(save_model, family: str, overrides: dict[str, object], names: str) -> None:
    folder = save_model(family, **overrides) if "num_key_value_heads" not in overrides else save_model(family)
    if "num_key_value_heads" in overrides:
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"num_key_value_heads": 2', '"num_key_value_heads": 3'))
    with pytest.raises(UserError) as caught:
        read_config(folder)
    assert names in str(caught.value)
    assert str(folder / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_windows_that_a_config_switches_off_and_asks_for_name_both_keys(save_model) -> None:
    path = save_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1) / "config.json"
    path.write_text(path.read_text().replace('"use_sliding_window": true', '"use_sliding_window": false'))
    with pytest.raises(UserError, match="use_sliding_window=false with sliding_attention in layer_types is not"):
        read_config(path.parent)


@each_case("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_torch_has_not_is_named_with_its_key(save_model, key: str) -> None:
    path = save_model("qwen3") / "config.json"
    path.write_text(path.read_text().replace('"dtype": "float32"', f'"{key}": "bfloat16x"'))
    with pytest.raises(UserError) as caught:
        read_config(path.parent)
    assert str(caught.value).startswith(f"{path}: {key}=bfloat16x is none of torch's dtypes")


def test_an_architecture_with_another_ones_config_is_refused(save_model) -> None:
    path = save_model("qwen3") / "config.json"
    path.write_text(path.read_text().replace("Qwen3ForCausalLM", "LlamaForCausalLM"))
    with pytest.raises(UserError) as caught:
        read_config(path.parent)
    assert str(caught.value) == f"{path}: model_type=qwen3 is not architecture LlamaForCausalLM's (expected: llama)"


def test_a_config_without_a_base_wavelength_is_refused(save_model) -> None:
    path = save_model("ministral") / "config.json"
    path.write_text(path.read_text().replace("10000.0", "null"))
    with pytest.raises(UserError, match=r"rope_parameters.rope_theta=None must be a number above 1"):
        read_config(path.parent)


@each_case(
    ("tp", "pp", "message"),
    [
        (3, 1, "policy.tp=3 does not divide heads=4"),
        (4, 1, "policy.tp=4 does not divide kv_heads=2"),
        (1, 2, "policy.pp=2 does not divide num_layers=3"),
        (0, 1, "policy.tp=0 must be at least 1"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(save_model, tp: int, pp: int, message: str) -> None:
    folder: Path = save_model("qwen3")
    _, _, arch = read_config(folder)
    with pytest.raises(UserError, match=message) as caught:
        arch.check_parallel(tp, pp)
    assert "must be" in message or str(folder) in str(caught.value)


def test_chunks_of_stages_divide_a_stage_of_several(save_model) -> None:
    _, _, arch = read_config(save_model("qwen3", num_hidden_layers=6))
    arch.check_parallel(1, 3, vpp=2)
    with pytest.raises(
        UserError, match=r"policy\.vpp=3 does not divide num_layers/policy\.pp=2 of .*: choose from 1, 2"
    ):
        arch.check_parallel(1, 3, vpp=3)
    for stages in (1, 2):
        with pytest.raises(
            UserError, match=rf"policy\.vpp=2 needs three pipeline stages or more, not policy\.pp={stages}"
        ):
            arch.check_parallel(1, stages, vpp=2)


def test_ffn_counts_too_and_fitting_layouts_pass(save_model) -> None:
    _, _, arch = read_config(save_model("qwen3", intermediate_size=33))
    arch.check_parallel(1, 3)
    with pytest.raises(UserError, match=r"memory\.tp=2 does not divide ffn=33"):
        arch.check_parallel(2, 1, prefix="memory.")
