"""Formulas of mixtures of experts, against closed forms counted by hand and against chance."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cases import each_case

from megasharp.config.policy import Dispatcher
from megasharp.convert.architecture import Architecture
from megasharp.planner import formulas, mixtures
from tests.unit.planner.test_formulas import model


def mixture() -> Architecture:
    return model("qwen3-30b-a3b")


def test_a_token_costs_its_own_experts_router_and_attention() -> None:
    """48 layers of 2048: queries, output and 4 + 4 heads of 128 for 32; a router of 128; 8 experts of 768; the head."""
    arch = mixture()
    layer = 2048 * (2 * 4096 + 2 * 512) + 2 * 2048 + 2 * 128 + 128 * 2048 + 8 * 3 * 2048 * 768
    assert formulas.forward_flops_per_token(arch, 0.0) == 2 * (48 * layer + 151_936 * 2048 + 2048)
    assert mixtures.expert_flops_per_token(arch) == 2 * 48 * 8 * 3 * 2048 * 768
    assert mixtures.expert_parameters(arch) == 48 * 128 * 3 * 2048 * 768
    dense = model("qwen3-8b")
    assert mixtures.expert_flops_per_token(dense) == mixtures.expert_parameters(dense) == 0


def test_experts_at_half_the_rate_take_twice_as_long() -> None:
    arch = mixture()
    plain, slower = (formulas.forward_flops_per_token(arch, 1000.0, grouped) for grouped in (1.0, 0.5))
    assert slower - plain == mixtures.expert_flops_per_token(arch)
    # The router, 2 FLOPs a weight, and the experts are computed again.
    again = formulas.recompute_share(arch, 1000.0, "selective", ["mlp"], 0.5) * slower
    assert again == pytest.approx(48 * 2 * 2048 * 128 + 2 * mixtures.expert_flops_per_token(arch))
    assert formulas.recompute_share(arch, 1000.0, "full", (), 0.5) == 1.0


def test_experts_take_a_ranks_own_rows() -> None:
    """Attention alone gathers and scatters between tensor-parallel ranks: half of what a dense layer moves."""
    arch = mixture()
    dense = replace(arch, experts=None)
    assert formulas.tensor_bytes_per_row(arch, 4, 2) == formulas.tensor_bytes_per_row(dense, 4, 2) / 2 > 0


def test_batching_counts_active_experts() -> None:
    arch = mixture()
    assert formulas.packing_flops(arch, False).per_row == formulas.forward_flops_per_token(arch, 0.0)


# Of one token, in hidden states of 2,048 bfloat16 numbers that come from other ranks, there and back.
EXCHANGED: list[tuple[Dispatcher, int, int, float]] = [
    ("alltoall", 1, 1, 0.0),
    ("alltoall", 8, 1, 2 * 8 * 7 / 8),
    # Each copy again from the other part's rank, and its outputs in float32.
    ("alltoall", 4, 2, 2 * 8 * 3 / 4 + 8 * (1 + 2)),
    ("deepep", 1, 1, 0.0),
    # Of 8 experts on 8 ranks, independently, 5.25 ranks have one at least.
    ("deepep", 8, 1, 2 * 8 * (1 - (7 / 8) ** 8) * 7 / 8),
    # Hidden states, and outputs in float32; probabilities and mask of 128 experts, 5 bytes each, in 4,096 bytes.
    ("allgather", 8, 1, 7 * (1 + 2 + 5 * 128 / 4096)),
]


@each_case(("dispatcher", "ep", "etp", "copies"), EXCHANGED)
def test_tokens_are_exchanged_as_each_dispatcher_does(dispatcher: Dispatcher, ep: int, etp: int, copies: float) -> None:
    experts = mixture().experts
    assert experts is not None
    found = mixtures.exchanged_bytes_per_token(experts, 2048, 2, dispatcher, ep=ep, etp=etp)
    assert found == pytest.approx(copies * 4096)


def test_the_ranks_that_deepep_sends_to_are_those_of_chance() -> None:
    """Experts of a token drawn one by one: the formula's mean, up to their being different experts."""
    draw, experts = random.Random(0), mixture().experts
    assert experts is not None
    ranks = [len({expert // 16 for expert in draw.sample(range(128), 8)}) for _ in range(4000)]
    found = mixtures.exchanged_bytes_per_token(experts, 2048, 2, "deepep", ep=8, etp=1) / (2 * 4096 * 7 / 8)
    assert found == pytest.approx(sum(ranks) / len(ranks), rel=0.03)


@each_case("tokens", [1, 8, 64])
def test_a_decode_step_reads_the_experts_that_its_tokens_go_to(tokens: int) -> None:
    draw = random.Random(tokens)
    drawn = [{e for _ in range(tokens) for e in draw.sample(range(128), 8)} for _ in range(400)]
    read = sum(map(len, drawn)) / len(drawn) / 128
    assert mixtures.weights_read(100.0, 90.0, 8 / 128, tokens) == pytest.approx(10 + 90 * read, rel=0.01)
    assert mixtures.weights_read(100.0, 0.0, 1.0, tokens) == 100.0


def test_a_route_has_a_byte_for_each_layer_and_expert() -> None:
    arch = mixture()
    assert arch.experts is not None
    assert mixtures.replay_bytes_per_token(arch) == 48 * 8
    assert mixtures.replay_bytes_per_token(replace(arch, experts=replace(arch.experts, count=512))) == 2 * 48 * 8
    assert mixtures.replay_bytes_per_token(model("qwen3-8b")) == 0


def test_etp_gathers_copies_and_cuts_experts() -> None:
    """A rank has each copy of two ranks' tokens, at half of an expert's width: inputs double, the rest stays."""
    experts = mixture().experts
    assert experts is not None
    one, two = (mixtures.kept_bytes_per_token(experts, 2048, 2, etp=etp, on_gpu=True) for etp in (1, 2))
    assert two - one == 8 * (2 * 2048 + 4)
    held = [mixtures.dispatched_bytes_per_token(experts, 2048, 2, "alltoall", ep=4, etp=etp) for etp in (1, 2)]
    assert held == [4 * 8 * 4096, 7 * 8 * 4096]
    gathered = mixtures.dispatched_bytes_per_token(experts, 2048, 2, "allgather", ep=8, etp=1)
    assert gathered == 8 * 2048 * (2 + 2 + 4) + 8 * 4096
