"""Weights to another process on the same GPU: CUDA's handles, memory that moves, a process that dies with it open."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from stand_in_engine import StandIn
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from waiting import HANG_S

from megasharp.config.rollout import SyncConfig
from megasharp.convert.hf_folder import TensorView
from megasharp.rollout.sglang.bucket import Header, checksum, new_stamp
from megasharp.weight_sync.broadcast import GroupPlan, SendPlan, join, leave, send
from megasharp.weight_sync.colocation import SharePlan
from megasharp.weight_sync.ipc import share

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Large and small copies, more than one launch holds, and one that is no multiple of anything.
SHAPES = {"large": (3000, 4096), "odd": (7, 13), **{f"small.{number}": (33, 64) for number in range(200)}}
SIZE = sum(torch.Size(shape).numel() for shape in SHAPES.values())


class Place:
    pp, exports, first_stage, last_stage = 0, True, True, True


class Part:
    """A learner's weights on the GPU, in one buffer; lent unless `lends` is off."""

    device, place = DEVICE, Place()

    def __init__(self, stays: bool = True, lends: bool = True) -> None:
        self.weights_stay, self.lends, self.moves = stays, lends, 0
        self.buffer = torch.randn(SIZE, device=DEVICE).bfloat16()

    def whole(self) -> dict[str, Tensor]:
        parts = self.buffer.split([torch.Size(shape).numel() for shape in SHAPES.values()])
        return {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        yield from self.whole().items()

    def weight_views(self) -> list[TensorView] | None:
        return [TensorView(name, 0, 0, values) for name, values in self.whole().items()] if self.lends else None

    def weights_state(self) -> tuple[int, ...]:
        return (self.moves, self.buffer.data_ptr())

    def offload(self) -> Tensor:
        """As `learner/offload.py`."""
        self.moves += 1
        held = self.buffer.cpu()
        self.buffer.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        return held

    def onload(self, held: Tensor) -> None:
        self.buffer.untyped_storage().resize_(held.nbytes)
        self.buffer.copy_(held)


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def engine() -> Iterator[StandIn]:
    made = StandIn(SHAPES, torch.bfloat16, DEVICE)
    made.checksums()
    yield made
    made.close()


def push(part: Part, engine: StandIn) -> None:
    """One push, and what arrived."""
    stamp = new_stamp(1, None)
    config = SyncConfig(bucket_mb=16, verify=True, limit_s=60.0)
    sent = share(part, SharePlan(stamp, "", torch.bfloat16, config, ((0, engine.api),), 1))
    assert sent is not None and sent.good, sent
    engine.end_push(Header(stamp))
    assert engine.checksums() == sent.digests == {name: checksum(tensor) for name, tensor in part.whole().items()}


def free() -> int:
    """Bytes of the GPU that nobody has, with what torch keeps for later given back."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("lends", [True, False])
def test_every_push_brings_what_is_there_now(engine: StandIn, lends: bool) -> None:
    part = Part(lends=lends)
    for _ in range(4):
        part.buffer.mul_(1.5)
        push(part, engine)


def test_memory_that_moved_is_read_where_it_is_now(engine: StandIn) -> None:
    part = Part(stays=False)
    for _ in range(3):
        push(part, engine)
        held = part.offload()
        # What took its place holds something else.
        others = torch.full((SIZE,), 7.0, dtype=torch.bfloat16, device=DEVICE)
        part.onload(held)
        part.buffer.add_(1)
        push(part, engine)
        del others


def test_what_is_offloaded_after_a_push_is_free(engine: StandIn) -> None:
    part = Part(stays=False)
    push(part, engine)
    before = free()
    held = part.offload()
    assert free() - before >= 0.9 * held.nbytes
    part.onload(held)
    push(part, engine)


def test_an_engine_that_died_with_it_open_keeps_nothing() -> None:
    part, victim = Part(), StandIn(SHAPES, torch.bfloat16, DEVICE)
    push(part, victim)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.close()
    deadline = time.monotonic() + HANG_S
    before, held = free(), part.offload()
    while free() - before < 0.9 * held.nbytes:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    part.onload(held)
    other = StandIn(SHAPES, torch.bfloat16, DEVICE)
    push(part, other)
    other.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_a_broadcast_to_another_gpu() -> None:
    part = Part()
    engine = StandIn(SHAPES, torch.bfloat16, torch.device("cuda", 1))
    plan = GroupPlan(0, "test", "nccl", "127.0.0.1", ((0, engine.api),), 1, 120.0, 120.0)
    joined = join(part, plan)
    assert joined is not None and joined.good, joined
    for _ in range(2):
        part.buffer.mul_(1.5)
        sent = send(part, plan, SendPlan(new_stamp(1, None), "", torch.bfloat16, 16, True))
        assert sent is not None and sent.good, sent
        assert engine.checksums() == sent.digests
    leave(part, plan.name)
    engine.close()


@pytest.mark.parametrize("count", [0, 1, 7, 4096, 300_001])
def test_checksums_are_the_cpus(count: int) -> None:
    tensor = torch.randn(count).bfloat16()
    assert checksum(tensor.to(DEVICE)) == checksum(tensor)
