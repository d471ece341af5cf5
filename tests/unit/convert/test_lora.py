"""Layout and merging of adapters, against one projection at a time in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.config.policy import LoraConfig, LoraTarget
from megasharp.convert.architecture import Architecture, RopeParameters
from megasharp.convert.families import FAMILIES
from megasharp.convert.lora import (
    MODULES,
    RECORD,
    TARGETS,
    input_size,
    merged,
    raised,
    record_adapters,
    recorded_adapters,
    recorded_base,
    rows_of,
    trained_parameters,
)
from megasharp.convert.mapping import Rule, Shard

RANK, SCALE = 3, 0.75
# head_dim is not hidden / heads, so that no size stands in for another.
ARCH = Architecture(
    family="qwen3", num_layers=2, hidden=24, heads=4, kv_heads=2, head_dim=8, ffn=20, vocab=11, norm_eps=1e-6,
    rope_parameters=RopeParameters(1e4), max_positions=64, tied=True, qkv_bias=False, qk_norm=True, dtype="float32",
)  # fmt: skip
FAMILY = FAMILIES["Qwen3ForCausalLM"]


def rule_of(target: LoraTarget) -> Rule:
    return FAMILY.rule_for(ARCH, f"decoder.layers.0.{MODULES[target]}.weight")[0]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projections(target: LoraTarget) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(W, A, B) of every Hugging Face projection of a target, as PEFT has them."""
    columns = input_size(target, ARCH)
    shapes = [ARCH.shape(shape) for shape in rule_of(target).shapes]
    assert all(shape[1] == columns for shape in shapes)
    return [
        (random(*shape, seed=i), random(RANK, columns, seed=10 + i), random(shape[0], RANK, seed=20 + i))
        for i, shape in enumerate(shapes)
    ]


@each_case("tp", [1, 2])
@each_case("target", TARGETS)
def test_fused_adapters_are_each_projections_own(target: LoraTarget, tp: int) -> None:
    """W x + scale B A x of every projection alone, fused by the weight's own rule, is what the fused parts give."""
    parts = projections(target)
    rule = rule_of(target)
    expected = [w + SCALE * b @ a for w, a, b in parts]
    stacked = torch.cat([a for _, a, _ in parts])
    split_columns = target in ("proj", "fc2")
    got = []
    for rank in range(tp):
        shard = Shard(rank, tp)
        weight = rule.shard([w for w, _, _ in parts], ARCH, shard)
        whole_b = [b for _, _, b in parts]
        b = whole_b[0] if split_columns else rule.shard(whole_b, ARCH, shard)
        a = stacked[:, slice(*_columns(stacked, shard))] if split_columns else stacked
        rows = rows_of(target, ARCH, tp)
        assert rows.total == weight.shape[0] == b.shape[0]
        got.append(merged(weight, a, b, rows, SCALE))
        x = random(5, a.shape[1], seed=40)
        assert torch.allclose(raised(x @ a.T, b, rows) * SCALE, x @ (got[-1] - weight).T, atol=1e-12)
    for one, (whole, fused) in enumerate(zip(expected, rule.merge(got, ARCH), strict=True)):
        assert torch.allclose(fused, whole, atol=1e-12), (target, one)


def _columns(a: Tensor, shard: Shard) -> tuple[int, int]:
    first, length = shard.rows_of(a.shape[1])
    return first, first + length


def test_merging_rounds_once_and_leaves_its_inputs() -> None:
    ((weight, a, b),) = projections("proj")
    low = [x.to(torch.bfloat16) for x in (weight, a, b)]
    before = [x.clone() for x in low]
    result = merged(*low, rows_of("proj", ARCH), SCALE)
    exact = low[0].double() + SCALE * low[2].double() @ low[1].double()
    assert result.dtype is torch.bfloat16 and result.is_contiguous()
    # Half a unit in the last of bfloat16's 8 bits, and float32's error on top.
    assert ((result.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-5).all()
    assert all(torch.equal(x, y) for x, y in zip(low, before, strict=True))


def test_the_number_of_trained_parameters_is_counted_from_the_projections() -> None:
    lora = LoraConfig(rank=RANK, alpha=1.0, targets=list(TARGETS))
    one_layer = sum(a.numel() + b.numel() for target in TARGETS for _, a, b in projections(target))
    assert trained_parameters(lora, ARCH) == ARCH.num_layers * one_layer


def test_a_record_comes_back_and_is_missing_where_there_are_no_adapters(tmp_path: Path) -> None:
    assert recorded_adapters(tmp_path) is None and recorded_base(tmp_path) is None
    lora = LoraConfig(rank=8, alpha=16.0, targets=["qkv", "fc2"])
    record_adapters(tmp_path, lora, Path("base"))
    assert recorded_adapters(tmp_path) == lora and lora.scale == 2.0
    assert recorded_base(tmp_path) == str(Path.cwd() / "base")


@each_case(
    ("text", "message"),
    [
        ("{", "not a record of adapters"),
        ('{"rank": 8, "targets": []}', "alpha: this key is required"),
        ('{"rank": 8, "alpha": 1.0, "targets": ["head"]}', "targets"),
    ],
)
def test_a_damaged_record_is_one_line_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(UserError, match=rf"lora\.json: {message}") as refused:
        recorded_adapters(tmp_path)
    assert "\n" not in str(refused.value)
