"""Mixtures of experts: what is read of config.json, what is refused by which key, and how a layout cuts them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.common.layout import ParallelLayout
from megasharp.convert.architecture import Experts, check_arguments, differences, model_arguments
from megasharp.convert.hf_folder import HFReader, expected_hf_shapes, read_config
from megasharp.learner.meta_models import alone, blank_model
from megasharp.learner.model_check import check_model

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 53,
    "max_position_embeddings": 64,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 40},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
}


@pytest.fixture
def save(tmp_path: Path):
    """`save(class, **config overrides)`: the folder that transformers writes."""
    import transformers

    def write(name: str, **overrides: object) -> Path:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **MIXTURES[name], **overrides})
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


def edit(folder: Path, **values: object) -> Path:
    """The folder with other values in its config.json; those that are `...` are removed."""
    path = folder / "config.json"
    text = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in text.items() if value is not ...}))
    return folder


@each_case("name", MIXTURES)
def test_parameters_are_transformers(save, name: str) -> None:
    """All of them, those that compute one token, and each one's name and shape."""
    from safetensors.torch import load_file

    folder = save(name)
    stored = {tensor: tuple(value.shape) for tensor, value in load_file(folder / "model.safetensors").items()}
    _, family, arch = read_config(folder)
    assert expected_hf_shapes(family, arch) == stored
    assert arch.parameter_count() == sum(map(math.prod, stored.values()))
    one = sum(math.prod(shape) for tensor, shape in stored.items() if "layers.0." in tensor and "experts.0." in tensor)
    assert arch.parameter_count() - arch.active_parameter_count() == 2 * (4 - 2) * one


@each_case(
    ("name", "overrides", "expected"),
    [
        ("Qwen3Moe", {"norm_topk_prob": True}, Experts(4, 2, 16, True)),
        ("Qwen3Moe", {"norm_topk_prob": False}, Experts(4, 2, 16, False)),
        ("Mixtral", {}, Experts(4, 2, 16, True)),
    ],
)
def test_routers_are_read(save, name: str, overrides: dict[str, object], expected: Experts) -> None:
    arch = read_config(save(name, router_aux_loss_coef=0.25, **overrides))[2]
    assert arch.experts == expected and arch.experts.balance_loss == 0.25
    assert arch.ffn == MIXTURES[name]["intermediate_size"]


@each_case(
    ("name", "values", "message"),
    [
        ("Qwen3Moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported \(supported: \[\]\)"),
        ("Qwen3Moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ("Qwen3Moe", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window=True is not supported"),
        ("Qwen3Moe", {"num_experts_per_tok": 1}, r"num_experts_per_tok=1 is not supported \(supported: 2 to 4"),
        ("Mixtral", {"num_experts_per_tok": 5}, r"num_experts_per_tok=5 is not supported \(supported: 2 to 4"),
        ("Mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
        ("Mixtral", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
    ],
)
def test_what_is_not_built_is_refused_by_its_key(save, name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(edit(save(name), **values))


@each_case(
    ("name", "values", "message"),
    [
        (
            "Qwen3Moe",
            {"num_experts": 5, "num_local_experts": ...},
            r"gate\..* asks for \(5, 24\) by num_experts=5",
        ),
        ("Qwen3Moe", {"moe_intermediate_size": 8}, r"asks for \(8, 24\) by moe_intermediate_size=8"),
        ("Mixtral", {"num_local_experts": 3}, r"asks for \(3, 24\) by num_local_experts=3"),
        ("Mixtral", {"intermediate_size": 8}, r"asks for \(8, 24\) by intermediate_size=8"),
        ("Qwen3Moe", {"num_hidden_layers": 3}, r"layers\.2\..* \(num_hidden_layers=3\)"),
    ],
)
def test_files_that_do_not_fit_name_the_key(save, name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HFReader(edit(save(name), **values))


def test_another_router_is_another_model(save) -> None:
    """Every tensor fits with another number of experts a token; what was recorded beside the weights does not."""
    folder = save("Qwen3Moe")
    arch = read_config(folder)[2]
    recorded = model_arguments(arch)
    changed = dataclasses.replace(arch, experts=Experts(4, 3, 16, False))
    found = differences(model_arguments(changed), recorded)
    assert found == [("num_experts_per_tok", 3, 2)]
    with pytest.raises(UserError, match="num_experts_per_tok=3, recorded 2"):
        check_arguments(folder / "config.json", changed, folder, recorded)


def test_a_dense_model_recorded_before_there_were_experts_is_the_same(save) -> None:
    arch = dataclasses.replace(read_config(save("Qwen3Moe"))[2], experts=None)
    recorded = {key: value for key, value in model_arguments(arch).items() if key != "experts"}
    assert differences(model_arguments(arch), recorded) == []


@each_case(
    ("name", "misread", "key"),
    [
        ("Qwen3Moe", Experts(4, 3, 16, False), "num_experts_per_tok=2 but the Megatron model has 3"),
        ("Qwen3Moe", Experts(4, 2, 8, False), "moe_intermediate_size=16"),
        ("Qwen3Moe", Experts(4, 2, 16, True), "norm_topk_prob=False"),
        ("Qwen3Moe", Experts(2, 2, 16, False), "num_experts=4"),
        ("Mixtral", Experts(4, 2, 16, False), "norm_topk_prob=True"),
    ],
)
def test_a_router_that_is_read_wrongly_is_found(save, name: str, misread: Experts, key: str) -> None:
    folder = save(name)
    arch = read_config(folder)[2]
    with alone() as place:
        check_model(blank_model(arch, place, torch.float32), arch, folder / "config.json")
        wrong = dataclasses.replace(arch, experts=misread)
        with pytest.raises(UserError, match=key):
            check_model(blank_model(wrong, place, torch.float32), wrong, folder / "config.json")


@each_case(
    ("layout", "message"),
    [
        (ParallelLayout(dp=3, ep=3), "policy.ep=3 does not divide experts=4"),
        (ParallelLayout(dp=5, etp=5), "policy.etp=5 does not divide expert_ffn=16"),
        (ParallelLayout(dp=2, ep=4), r"policy.ep=4 x policy.etp=1 does not divide dp x tp x cp = 2"),
        (ParallelLayout(tp=4), "policy.tp=4 does not divide kv_heads=2"),
    ],
)
def test_a_layout_that_cannot_cut_the_experts_is_refused(save, layout: ParallelLayout, message: str) -> None:
    arch = read_config(save("Mixtral"))[2]
    arch.check_layout(ParallelLayout(dp=2, tp=2, ep=2, etp=2))
    with pytest.raises(UserError, match=message):
        arch.check_layout(layout)


def test_a_dense_model_has_no_expert_parallelism(save) -> None:
    arch = dataclasses.replace(read_config(save("Mixtral"))[2], experts=None)
    with pytest.raises(UserError, match="has no experts: set both to 1"):
        arch.check_layout(ParallelLayout(dp=2, ep=2))
