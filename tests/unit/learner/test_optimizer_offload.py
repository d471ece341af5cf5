"""Adam from host memory, in pieces, equals Adam on whole parameters bit for bit, however they are cut.

And host memory that a GPU could copy from, which the host may not have.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.learner.cpu_backend import Adam, on_cpu
from megasharp.learner.optimizer_offload import PIECE, SLOTS, PageLocked, StreamedAdam, cut
from megasharp.planner.formulas import staging_bytes

CPU = torch.device("cpu")
# Two groups, which differ in weight decay; a shard may be empty, smaller than a piece, or several of them.
COUNTS = [[300, 0, 64, 1], [1000, 7]]
SETTINGS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@each_case("size", [64, 128, 4096])
@each_case("groups", [COUNTS, [[]], [], [[5]], [[128, 128]]])
def test_every_element_is_in_one_piece(groups: list[list[int]], size: int) -> None:
    starts, total, pieces = cut(groups, size)
    seen = torch.zeros(total, dtype=torch.int64)
    counts = [count for group in groups for count in group]
    for piece in pieces:
        assert 0 < piece.size <= size and piece.start % 64 == 0
        for part in piece.parts:
            assert 0 <= part.first < part.last <= counts[part.parameter]
            assert part.offset + part.last - part.first <= piece.size
            # In its piece it lies where it lies in flat memory.
            assert piece.start + part.offset == starts[part.parameter] + part.first
            seen[starts[part.parameter] + part.first : starts[part.parameter] + part.last] += 1
            assert part.parameter >= sum(map(len, groups[: piece.group]))
            assert part.parameter < sum(map(len, groups[: piece.group + 1]))
    for start, count in zip(starts, counts, strict=True):
        assert start % 64 == 0 and bool((seen[start : start + count] == 1).all())
    assert int(seen.sum()) == sum(counts)


def test_what_a_step_takes_is_planned() -> None:
    """It does not grow with the model."""
    assert staging_bytes(8_000_000_000) == staging_bytes(100_000_000) == 12 * SLOTS * PIECE
    assert staging_bytes(1000) == 12_000 * SLOTS


@dataclass
class Pair:
    """Main weights of both optimizers, and the weights in bfloat16 that each of them keeps up to date."""

    plain: Adam
    streamed: StreamedAdam
    mains: tuple[list[Tensor], list[Tensor]]
    weights: tuple[list[Tensor], list[Tensor]]

    def step(self, generator: torch.Generator) -> None:
        for one, other in zip(*self.mains, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.decoupled_grad = one.grad.clone()  # type: ignore[attr-defined]
        self.plain.step()
        for weight, main in zip(self.weights[0], self.mains[0], strict=bool(self.weights[0])):
            weight.copy_(main)
        with on_cpu():
            self.streamed.step()

    def same(self) -> bool:
        return all(torch.equal(a, b) for pair in (self.mains, self.weights) for a, b in zip(*pair, strict=True))


def pair(generator: torch.Generator, piece: int = 128, lower: bool = True, decoupled: bool = True) -> Pair:
    values = [[torch.randn(count, generator=generator) for count in group] for group in COUNTS]

    def groups() -> list[dict[str, object]]:
        decays = (0.1, 0.0)
        return [
            {**SETTINGS, "weight_decay": decay, "params": [value.clone() for value in group]}
            for decay, group in zip(decays, values, strict=True)
        ]

    first, second = groups(), groups()
    plain = Adam([torch.empty(0)], adam_w_mode=decoupled)
    plain.param_groups = first
    mains = tuple([p for group in both for p in group["params"]] for both in (first, second))  # type: ignore[attr-defined]
    weights = tuple([main.bfloat16() for main in each] for each in mains)
    copies = dict(zip(mains[1], weights[1], strict=True)) if lower else {}
    streamed = StreamedAdam(second, copies, CPU, decoupled, piece)
    return Pair(plain, streamed, mains, weights if lower else ([], []))  # type: ignore[arg-type]


@each_case("decoupled", [True, False], ids=["adamw", "adam"])
@each_case("lower", [True, False], ids=["bfloat16", "float32"])
@each_case("piece", [64, 512, 1 << 20])
def test_bits_are_adams(piece: int, lower: bool, decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    both = pair(generator, piece, lower, decoupled)
    for _ in range(4):
        both.step(generator)
        assert both.same()
    assert [group["step"] for group in both.streamed.param_groups] == [4, 4]
    for one, other in zip(*both.mains, strict=True):
        for name, moment in both.plain.state[one].items():
            assert torch.equal(both.streamed.state[other][name], moment)


def test_state_goes_from_one_to_the_other_and_back() -> None:
    generator = torch.Generator().manual_seed(0)
    first = pair(generator)
    first.step(generator)
    for state in (first.plain.state_dict(), first.streamed.state_dict()):
        second = pair(generator)
        addresses = [state["exp_avg"].data_ptr() for state in second.streamed.state.values()]
        second.streamed.load_state_dict(state)
        for mains, source in zip(second.mains, (first.mains[0], first.mains[0]), strict=True):
            for main, value in zip(mains, source, strict=True):
                main.copy_(value)
        second.plain.load_state_dict(deepcopy(first.plain.state_dict()))
        assert [group["step"] for group in second.streamed.param_groups] == [1, 1]
        second.step(generator)
        assert second.same()
        # In the memory that was locked, which the source's own state does not share.
        assert addresses == [state["exp_avg"].data_ptr() for state in second.streamed.state.values()]


def test_forgotten_moments_are_zero_and_in_their_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    both = pair(generator)
    both.step(generator)
    addresses = [state["exp_avg"].data_ptr() for state in both.streamed.state.values()]
    for optimizer in (both.plain, both.streamed):
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group.pop("step")
    both.step(generator)
    assert both.same() and addresses == [state["exp_avg"].data_ptr() for state in both.streamed.state.values()]


def test_more_than_the_host_has() -> None:
    message = r"^policy\.offload: the host has no 4000000000\.0 GB of memory left for it; ask .*, or list less there$"
    with pytest.raises(UserError, match=message):
        PageLocked(10**18, torch.float32, torch.device("cpu"), "policy.offload", "list less there")


def test_beside_a_cpu_nothing_is_locked() -> None:
    assert PageLocked(3, torch.bfloat16, torch.device("cpu"), "", "").memory.tolist() == [0.0, 0.0, 0.0]
