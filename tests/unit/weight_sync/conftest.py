"""Stand-ins for engines, shared with the tests of their client, and learners that yield lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megasharp.config.rollout import SyncConfig
from megasharp.rollout.sglang.bucket import checksum
from megasharp.weight_sync.push import FleetSync, make_transport
from tests.unit.rollout.sglang.conftest import StandIns
from tests.unit.rollout.sglang.conftest import limited as limited
from tests.unit.rollout.sglang.conftest import make as make
from tests.unit.rollout.sglang.conftest import quick_flush as quick_flush

Named = list[tuple[str, Tensor]]


class Source:
    """A learner without ranks."""

    def __init__(self, tensors: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self.tensors = tensors

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors()


def weights(seed: int = 0) -> Named:
    """Some of a megabyte, so that one MiB per bucket makes several; with a tied pair and another dtype."""
    generator = torch.Generator().manual_seed(seed)
    named = [(f"layer.{n}.weight", torch.randn(300, 400, generator=generator)) for n in range(6)]
    named += [("norm.weight", torch.randn(7, generator=generator).to(torch.bfloat16))]
    return [*named, ("tied.weight", named[0][1])]


def source(seed: int = 0) -> Source:
    return Source(lambda: weights(seed))


def memory(seed: int = 0) -> Source:
    return Source(lambda: [("norm.weight", torch.full((3,), float(seed)))])


def sums(named: Named, prefix: str = "") -> dict[str, str]:
    """What the engines, whose dtype is float32, must hold."""
    return {prefix + name: checksum(tensor.float()) for name, tensor in named}


@pytest.fixture
def sync(tmp_path: Path) -> Callable[..., FleetSync]:
    shared = tmp_path / "shared"

    def build(
        stand_ins: StandIns,
        kind: Any,
        version: int = -1,
        memory_version: int = -1,
        folder: Path | None = shared,
        **config: Any,
    ) -> FleetSync:
        shared.mkdir(exist_ok=True)
        made = make_transport(stand_ins.fleet, kind, SyncConfig(**{"bucket_mb": 1, **config}), folder=folder)
        return FleetSync(stand_ins.fleet, made, version, memory_version)

    return build
