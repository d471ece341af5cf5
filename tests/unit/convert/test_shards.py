"""Cutting into tensor-parallel shards and joining them: bit-exact, and in Megatron's layout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import FAMILIES, Family
from megasharp.convert.hf_folder import expected_hf_shapes, hf_tensors, hf_views, megatron_tensor
from megasharp.convert.mapping import Shard, padded_vocab

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LLAMA_LAYER = [
    "input_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
]
LAYER_NAMES = {
    "llama": LLAMA_LAYER,
    "mistral": LLAMA_LAYER,
    "ministral": LLAMA_LAYER,
    "qwen3": [
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ],
    "qwen2": [
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ],
    "olmo2": [
        "self_attention.linear_qkv.weight",
        "self_attention.q_norm.weight",
        "self_attention.k_norm.weight",
        "self_attention.linear_proj.weight",
        "self_attn_bda.norm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
        "mlp_bda.norm.weight",
    ],
}


class StateDict:
    """A reader over tensors in memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tensors = model.state_dict()
        self.family: Family = FAMILIES[type(model).__name__]
        self.arch: Architecture = self.family.architecture(model.config)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def shards(self, name: str, tp: int, multiple: int = 1) -> list[Tensor]:
        return [megatron_tensor(self, self.family, self.arch, name, rank, tp, multiple) for rank in range(tp)]

    def merged(self, name: str, shards: list[Tensor]) -> dict[str, Tensor]:
        return dict(hf_tensors(self.family, self.arch, name, shards))


def megatron_names(family: str, layers: int) -> list[str]:
    per_layer = [f"decoder.layers.{i}.{name}" for i in range(layers) for name in LAYER_NAMES[family]]
    return [
        "embedding.word_embeddings.weight",
        *per_layer,
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@each_case("dtype", [torch.float32, torch.bfloat16])
@each_case("tied", [True, False])
@each_case("tp", [1, 2, 4])
@each_case("family", LAYER_NAMES)
def test_round_trip_is_bit_exact(make_model, family: str, tp: int, tied: bool, dtype: torch.dtype) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4} if tp == 4 else {}
    model = make_model(family, tie_word_embeddings=tied, **sizes).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    reader = StateDict(model)
    merged: dict[str, Tensor] = {}
    for name in megatron_names(family, layers=3):
        shards = reader.shards(name, tp)
        assert all(shard.is_contiguous() for shard in shards)
        tensors = reader.merged(name, shards)
        assert not merged.keys() & tensors.keys()
        merged |= tensors
    expected = {k: v for k, v in reader.tensors.items() if not (tied and k == "lm_head.weight")}
    assert merged.keys() == expected.keys() == expected_hf_shapes(reader.family, reader.arch).keys()
    assert all(same_bits(merged[name], expected[name]) for name in expected)
    assert all(tensor.is_contiguous() for tensor in merged.values())


@each_case("family", LAYER_NAMES)
def test_a_head_s_query_key_and_value_lie_in_this_order(make_model, family: str) -> None:
    """Of equal sizes, as without grouped queries, where no shape tells a query from a key."""
    reader = StateDict(make_model(family, num_key_value_heads=4))
    name, dim = "decoder.layers.1.self_attention.linear_qkv.weight", reader.arch.head_dim
    (fused,) = reader.shards(name, 1)
    wholes = [reader.tensor(f"model.layers.1.self_attn.{x}_proj.weight") for x in "qkv"]
    for head, rows in enumerate(fused.split(3 * dim)):
        for whole, part in zip(wholes, rows.split(dim), strict=True):
            assert same_bits(part, whole[head * dim : (head + 1) * dim])
    assert all(same_bits(tensor, reader.tensor(key)) for key, tensor in reader.merged(name, [fused]).items())


@each_case("family", LAYER_NAMES)
@each_case(("tp", "tied"), [(1, False), (2, True), (4, False)])
def test_views_of_all_ranks_make_up_every_tensor_once(make_model, family: str, tp: int, tied: bool) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4} if tp == 4 else {}
    reader = StateDict(make_model(family, tie_word_embeddings=tied, **sizes))
    whole = {name: torch.full_like(tensor, float("nan")) for name, tensor in reader.tensors.items()}
    seen = {name: torch.zeros_like(tensor) for name, tensor in reader.tensors.items()}
    for name in megatron_names(family, layers=3):
        for rank, shard in enumerate(reader.shards(name, tp)):
            for view in hf_views(reader.family, reader.arch, name, shard, Shard(rank, tp)):
                assert view.values.is_contiguous()
                assert view.values.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
                where = (view.dim, view.start, view.values.shape[view.dim])
                whole[view.name].narrow(*where).copy_(view.values)
                seen[view.name].narrow(*where).add_(1)
    for name, tensor in reader.tensors.items():
        if tied and name == "lm_head.weight":
            assert torch.count_nonzero(seen[name]) == 0
            continue
        assert torch.equal(whole[name], tensor), name
        cut = reader.arch.qk_norm_whole and name.endswith(("q_norm.weight", "k_norm.weight"))
        replicated = tensor.ndim == 1 and "norm" in name and not cut
        assert set(seen[name].unique().tolist()) == ({float(tp)} if replicated else {1.0})


@each_case("tied", [True, False])
@each_case("family", LAYER_NAMES)
def test_expected_shapes_equal_transformers(make_model, family: str, tied: bool) -> None:
    reader = StateDict(make_model(family, tie_word_embeddings=tied))
    shapes = {name: tuple(tensor.shape) for name, tensor in reader.tensors.items()}
    if tied:
        del shapes["lm_head.weight"]
    assert expected_hf_shapes(reader.family, reader.arch) == shapes


@each_case("tied", [True, False])
@each_case("family", LAYER_NAMES)
def test_shapes_of_a_stage_are_those_of_its_shards(make_model, family: str, tied: bool) -> None:
    reader = StateDict(make_model(family, tie_word_embeddings=tied))
    whole = reader.family.parameter_shapes(reader.arch, 1, layers=range(3), first_stage=True, last_stage=True)
    assert sum(math.prod(shape) for shape in whole.values()) == reader.arch.parameter_count()
    first = reader.family.parameter_shapes(reader.arch, 2, layers=range(2), first_stage=True, last_stage=False)
    last = reader.family.parameter_shapes(reader.arch, 2, layers=range(2, 3), first_stage=False, last_stage=True)
    assert sorted([*first, *last]) == sorted(megatron_names(family, layers=3))
    for name, shape in (first | last).items():
        assert {tuple(shard.shape) for shard in reader.shards(name, tp=2)} == {shape}


@each_case("kind", ["weight", "bias"])
@each_case("tp", [1, 2])
def test_fused_qkv_follows_query_groups(make_model, tp: int, kind: str) -> None:
    reader = StateDict(make_model("qwen2", num_attention_heads=6, hidden_size=24))
    name = f"decoder.layers.2.self_attention.linear_qkv.{kind}"
    query, key, value = (reader.tensors[f"model.layers.2.self_attn.{x}_proj.{kind}"] for x in "qkv")
    head_dim, kv_heads, queries_per_group = 4, 2, 3
    for rank, shard in enumerate(reader.shards(name, tp)):
        rows = []
        for group in range(rank * kv_heads // tp, (rank + 1) * kv_heads // tp):
            for head in range(group * queries_per_group, (group + 1) * queries_per_group):
                rows += [query[head * head_dim + i] for i in range(head_dim)]
            rows += [key[group * head_dim + i] for i in range(head_dim)]
            rows += [value[group * head_dim + i] for i in range(head_dim)]
        assert torch.equal(shard, torch.stack(rows))


def test_gate_and_up_are_paired_on_each_rank(make_model) -> None:
    reader = StateDict(make_model("qwen3"))
    gate, up = (reader.tensors[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    first, second = reader.shards("decoder.layers.1.mlp.linear_fc1.weight", tp=2)
    assert torch.equal(first, torch.cat([gate[:16], up[:16]]))
    assert torch.equal(second, torch.cat([gate[16:], up[16:]]))


@each_case(("name", "hf"), [("self_attention.linear_proj", "self_attn.o_proj"), ("mlp.linear_fc2", "mlp.down_proj")])
def test_second_linear_maps_are_cut_by_columns(make_model, name: str, hf: str) -> None:
    reader = StateDict(make_model("qwen3"))
    whole = reader.tensors[f"model.layers.0.{hf}.weight"]
    first, second = reader.shards(f"decoder.layers.0.{name}.weight", tp=2)
    assert torch.equal(first, whole[:, :16])
    assert torch.equal(second, whole[:, 16:])


@each_case(("tp", "multiple", "rows"), [(1, 1, 53), (2, 1, 27), (2, 16, 32), (2, 64, 64), (4, 32, 32)])
def test_vocabulary_is_padded_with_zero_rows(make_model, tp: int, multiple: int, rows: int) -> None:
    reader = StateDict(make_model("qwen3"))
    whole = reader.tensors["lm_head.weight"]
    shards = reader.shards("output_layer.weight", tp, multiple)
    assert [tuple(shard.shape) for shard in shards] == [(rows, 24)] * tp
    stacked = torch.cat(shards)
    assert torch.equal(stacked[:53], whole)
    assert torch.count_nonzero(stacked[53:]) == 0
    assert padded_vocab(53, tp, multiple) == rows * tp
    assert torch.equal(reader.merged("output_layer.weight", shards)["lm_head.weight"], whole)


def test_tied_head_is_filled_from_the_embedding_and_never_exported(make_model) -> None:
    reader = StateDict(make_model("qwen2", tie_word_embeddings=True))
    del reader.tensors["lm_head.weight"]
    shards = reader.shards("output_layer.weight", tp=2)
    assert torch.equal(torch.cat(shards)[:53], reader.tensors["model.embed_tokens.weight"])
    assert reader.merged("output_layer.weight", shards) == {}


@each_case(
    ("fused", "plain"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm"),
        ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm"),
    ],
)
def test_fused_norm_names_are_understood(make_model, fused: str, plain: str) -> None:
    reader = StateDict(make_model("qwen3"))
    shards = reader.shards(f"decoder.layers.1.{fused}", tp=2)
    assert all(torch.equal(shard, reader.tensors[f"model.layers.1.{plain}.weight"]) for shard in shards)
    assert list(reader.merged(f"decoder.layers.1.{fused}", shards)) == [f"model.layers.1.{plain}.weight"]


def test_shards_own_their_memory(make_model) -> None:
    reader = StateDict(make_model("qwen3"))
    sources = {tensor.untyped_storage().data_ptr() for tensor in reader.tensors.values()}
    for name in megatron_names("qwen3", layers=3):
        (shard,) = reader.shards(name, tp=1)
        assert shard.untyped_storage().data_ptr() not in sources
        assert shard.untyped_storage().nbytes() == shard.nbytes


@each_case(
    "name",
    [
        "decoder.layers.3.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "x.weight",
    ],
)
def test_names_the_model_does_not_have(make_model, name: str) -> None:
    reader = StateDict(make_model("qwen3"))
    with pytest.raises(KeyError, match=r"has no Megatron parameter"):
        reader.shards(name, tp=1)
