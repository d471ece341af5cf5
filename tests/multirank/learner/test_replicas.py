"""Copies that ranks hold are equal after steps, and one flipped bit in any of them is found and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from policies import LAYOUTS, learner_on, packed, ragged_sequences, recipe, save_model, settings
from torch import Tensor

from megasharp.common.layout import ParallelLayout
from megasharp.config.policy import LoraConfig
from megasharp.convert.lora import TARGETS
from megasharp.learner.learner import RankLearner
from megasharp.learner.optimizer import parts
from megasharp.learner.replicas import Checksums, _Summing, difference
from megasharp.learner.weights import global_parameters

FC1, NORM = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.0.input_layernorm.weight"
EXPERT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
EMBEDDING = "embedding.word_embeddings.weight"
Find = Callable[[RankLearner], Tensor | None]


def weight(name: str) -> Callable[[RankLearner], Tensor | None]:
    return lambda rank: dict(global_parameters(rank._chunks)).get(name)


def state(name: str, kind: str) -> Find:
    """A rank's part of the state of a parameter; None where it has none."""

    def find(rank: RankLearner) -> Tensor | None:
        own = dict(global_parameters(rank._chunks)).get(name)
        for part in parts(rank._optimizer):
            for models, shards, mains in (
                (part.model_float16_groups, part.shard_fp32_from_float16_groups, True),
                (part.model_fp32_groups, part.shard_fp32_groups, False),
            ):
                for parameter, shard in zip(chain(*models), chain(*shards), strict=True):
                    if parameter is own:
                        return shard if mains and kind == "main" else part.optimizer.state[shard][kind]
        return None

    return find


@torch.no_grad()
def flip(tensor: Tensor) -> None:
    """The lowest bit of the last element."""
    bits = tensor.detach().view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32).view(-1)
    bits[-1] ^= 1


FLIPS: dict[str, tuple[Find, str]] = {
    "weight": (weight(FC1), FC1),
    "norm": (weight(NORM), NORM),
    "tied": (weight("output_layer.weight"), EMBEDDING),
    "moment": (state(NORM, "exp_avg_sq"), f"exp_avg_sq of {NORM}, elements "),
    "main": (state(NORM, "main"), f"main weights of {NORM}, elements "),
    "tied moment": (state("output_layer.weight", "exp_avg"), f"exp_avg of {EMBEDDING}"),
    "frozen": (weight(FC1), FC1),
    "expert": (weight(EXPERT), EXPERT),
}


def texts_of(
    rank: int, world: int, folder: str, layout: ParallelLayout, bf16: bool, flips: Sequence[str], overrides: dict
) -> list[str | None]:
    """The comparison's words before a step, after two, and after a flip of each on the last rank that has it."""
    method = recipe()
    values = settings(folder, layout, method.needs, dtype=torch.bfloat16 if bf16 else torch.float32, **overrides)
    with learner_on(values) as (learner, own):

        def compared() -> str | None:
            return difference(learner.call(RankLearner.replica_checksums))

        said = [compared()]
        for seed in (1, 2):
            learner.step(packed(ragged_sequences(seed), layout), method)
        said.append(compared())
        for name in flips:
            found = FLIPS[name][0](own)
            holders = [r for r, has in enumerate(learner.call(_has, name)) if has]
            if rank == holders[-1]:
                assert found is not None
                flip(found)
            said.append(compared())
            if rank == holders[-1]:
                flip(found)
        said.append(compared())
    return said


def _has(rank: RankLearner, name: str) -> bool:
    return FLIPS[name][0](rank) is not None


LORA = {"lora": LoraConfig(rank=4, alpha=8.0, targets=list(TARGETS))}
CASES = [
    ("dp2", False, ["weight", "norm"], {}),
    ("tp2", True, ["norm", "moment", "main"], {}),
    *(
        pytest.param(*case, marks=pytest.mark.long("layouts"))
        for case in [
            ("tp2dp2", True, ["weight", "norm", "moment", "main"], {}),
            ("tp2dp2", True, ["weight", "norm", "moment", "main"], {"optimizer_offload": True}),
            ("tp2dp2", False, ["weight", "frozen"], LORA),
            ("dp2cp2", False, ["weight"], {}),
            ("tp2pp2", False, ["norm", "moment", "tied", "tied moment"], {}),
            ("pp2", True, ["tied", "tied moment"], {}),
            ("dp2", True, ["weight"], {"overlap": True}),
            ("tp2dp2ep2", True, ["expert", "norm", "moment", "main"], {}),
            ("tp2etp2", False, ["norm", "moment"], {}),
        ]
    ),
]


@pytest.mark.parametrize(("name", "bf16", "flips", "overrides"), CASES)
def test_copies_are_equal_and_a_flipped_bit_is_named(
    tmp_path: Path, name: str, bf16: bool, flips: list[str], overrides: dict[str, object]
) -> None:
    layout = LAYOUTS[name]
    # Qwen2's projections have biases, which tensor parallelism cuts.
    mixture = layout.ep > 1 or layout.etp > 1
    folder = save_model(tmp_path, "qwen3moe" if mixture else "qwen2-tied" if name == "tp2" else "qwen3-tied")
    (before, after, *said, mended), *others = run_ranks(layout.world, texts_of, folder, layout, bf16, flips, overrides)
    assert before is after is mended is None
    assert all(other == [before, after, *said, mended] for other in others)
    for flipped, text in zip(flips, said, strict=True):
        assert text is not None and text.startswith(FLIPS[flipped][1]) and "(1 of " in text, (flipped, text)
        assert "rank" in text


def test_a_checksum_tells_any_word_and_any_order() -> None:
    summing = _Summing()
    for dtype, size in ((torch.float32, 3), (torch.bfloat16, 4099), (torch.float32, 2_200_001), (torch.float64, 0)):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64).to(dtype)
        own = int(summing.checksum(x))
        aside = torch.cat([x.new_zeros(1), x])[1:]
        assert int(summing.checksum(aside)) == own, "the place in memory counts"
        for place in {0, size // 2, size - 1} if size else ():
            changed = x.clone()
            changed.view(torch.uint8)[place * x.itemsize] ^= 0x80
            assert int(summing.checksum(changed)) != own
        if size > 1:
            assert int(summing.checksum(x.flip(0))) != own


def test_the_odd_one_is_named_where_most_are_equal() -> None:
    ranks = [Checksums(f"host{number}", {"w": 7, "v": 1 + (number == 5)}) for number in range(7)]
    ranks[2] = Checksums("host2", {"w": 8, "v": 1, "own": 3})
    assert difference(ranks) == (
        "w on rank 2 (host2) is not what it is on ranks 0 (host0), 1 (host1), 3 (host3), 4 (host4) and 2 more "
        "(2 of 2 compared tensors)"
    )
    assert difference(ranks[1:3]) == "w differs between rank 0 (host1) and rank 1 (host2) (1 of 2 compared tensors)"
    assert difference([ranks[0], Checksums("b", {"own": 1})]) is None
