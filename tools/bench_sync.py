"""How fast weights reach an engine, beside a plain copy of as many bytes on the same device.

    python tools/bench_sync.py --model qwen3-8b               # one GPU; with two and more NCCL too; weights are drawn
    python tools/bench_sync.py --model qwen3-1.7b --layers 4  # a CPU: handles of /dev/shm instead of CUDA's, gloo

The learner's side is what a run does (`weight_sync/ipc.py`, `weight_sync/broadcast.py`). Its parameters lie
in one buffer, as the distributed optimizer has them. Another process stands in for an engine (`stand_in_engine.py`)
and reads lent memory with the engines' own code. HTTP and SGLang's part are not in the figures.

Seconds are from before the first byte until the device of both sides is done, medians after a run that does not count.
The plain copy is timed before each push, so that what else the machine does meets both.
`first`: everything is told. `later`: the engine is only told to copy. `moved`: the learner's memory was emptied and
filled since, as `policy.offload` does it, so handles are made and opened anew. With verify every tensor's checksum is
computed on both sides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from described import drawn
from results import Figure, report
from stand_in_engine import StandIn
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from megasharp.common.errors import UserError
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import as_dtype
from megasharp.config.policy import PolicyConfig
from megasharp.config.rollout import SyncConfig
from megasharp.convert.hf_folder import TensorView, expected_hf_shapes, read_config
from megasharp.learner.model import build_chunks, transformer_config
from megasharp.learner.parallel import Place, device_of_rank, initialize, meet, megatron_device
from megasharp.learner.weights import export_stage, first_weights, weight_views
from megasharp.rollout.sglang.bucket import Header, new_stamp
from megasharp.weight_sync.broadcast import GroupPlan, SendPlan, join, leave, send
from megasharp.weight_sync.buckets import RankPart
from megasharp.weight_sync.colocation import SharePlan
from megasharp.weight_sync.ipc import share

BAR = 70.0
_LIMIT_S = 300.0
_BROADCASTS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured: `layers` other than the model's, buckets of `bucket_mb` MiB."""

    model: str
    layers: int | None
    dtype: str
    bucket_mb: int
    repeats: int


class Gathering:
    """One rank's weights without an optimizer, for those who take whole tensors; satisfies `RankPart`."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        with megatron_device(device), first_weights(folder, drawn=True) as source:
            self.place: Place = initialize(ParallelLayout(), seed=0)
            self.family, self.architecture = source.family, source.architecture
            config = transformer_config(source.architecture, ParallelLayout(), dtype, PolicyConfig(), {})
            self.chunks = build_chunks(config, source.architecture, self.place)
            for chunk in self.chunks:
                chunk.to(device)
            source.fill(self.chunks, self.place)

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """All weights, as a run's learner gives them."""
        return export_stage(self.chunks, self.family, self.architecture, self.place, everywhere)


class Lending:
    """The same weights in one buffer; satisfies `LendingPart`. `weights_stay`: what engines are told of it."""

    def __init__(self, part: Gathering) -> None:
        self._part = part
        self.place, self.device, self.weights_stay = part.place, part.device, True
        self._moves = 0
        parameters = self._parameters()
        sizes = [parameter.numel() for parameter in parameters]
        with torch.no_grad():
            self._buffer = torch.cat([parameter.reshape(-1) for parameter in parameters])
        for parameter, flat in zip(parameters, self._buffer.split_with_sizes(sizes), strict=True):
            parameter.data = flat.view(parameter.shape)

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """All weights, as whole tensors."""
        return self._part.export_weights(everywhere)

    def weight_views(self) -> list[TensorView] | None:
        """Where they lie."""
        return weight_views(self._part.chunks, self._part.family, self._part.architecture, self.place)

    def weights_state(self) -> tuple[int, ...]:
        """Changes with `move`."""
        return (self._moves, *(parameter.data_ptr() for parameter in self._parameters()))

    def move(self) -> None:
        """Give the memory back and take it again, as `learner/offload.py` does on a GPU."""
        self._moves += 1
        if self.device.type == "cuda":
            storage = self._buffer.untyped_storage()
            size, content = storage.nbytes(), self._buffer.cpu()
            storage.resize_(0)
            torch.cuda.empty_cache()
            storage.resize_(size)
            self._buffer.copy_(content)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self._part.chunks for parameter in chunk.parameters()]


def main() -> None:
    """Measure and print."""
    setting = arguments()
    device = device_of_rank(torch.device("cuda" if torch.cuda.is_available() else "cpu"), 0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet(HashStore(), 0, 1, device)
    with tempfile.TemporaryDirectory() as name:
        folder = drawn(setting.model, setting.layers, Path(name))
        _, family, architecture = read_config(folder)
        shapes = {name: tuple(shape) for name, shape in expected_hf_shapes(family, architecture).items()}
        dtype = as_dtype(setting.dtype)
        part = Gathering(folder, dtype, device)
    size = sum(tensor.nbytes for _, tensor in part.export_weights())
    plain = plain_copy(size, device)
    with closing(StandIn(shapes, dtype, device)) as engine:
        buckets = Sharing(setting, engine, part, device)
        figures = told("buckets", beside(plain, buckets.push, setting.repeats, device), size, None)
        figures += verified("buckets", buckets.verified(), setting)
    lending = Lending(part)
    with closing(StandIn(shapes, dtype, device)) as engine:
        lent = Sharing(setting, engine, lending, device)
        first = lent.first()
        # The bar is for GPUs: a CPU has one kind of memory, and others use it too.
        bar = BAR if device.type == "cuda" else None
        figures += told("lent, later", beside(plain, lent.push, setting.repeats, device), size, bar)
        figures += [Figure("lent, first", first, "s", note="everything is told")]
        lending.weights_stay = False
        figures += told("lent, moved", beside(plain, lent.push, setting.repeats, device, lending.move), size, bar)
        figures += verified("lent", lent.verified(), setting)
    figures += broadcast(setting, lending, shapes, size)
    shown = {name: getattr(setting, name) for name in Setting.__slots__} | {"bytes": size, "load": os.getloadavg()[0]}
    report("bench_sync", figures, shown, subject=Path(setting.model).name)
    dist.destroy_process_group()


def told(name: str, seconds: list[tuple[float, float]], size: int, bar: float | None) -> list[Figure]:
    """The figures of one way, from seconds of a plain copy and of a push."""
    repeats = len(seconds)
    plain, pushed = (statistics.median(each) for each in zip(*seconds, strict=True))
    return [
        Figure(name, pushed, "s", repeats=repeats),
        Figure(f"{name}: rate", size / pushed / 1e9, "GB/s", better="higher", repeats=repeats),
        Figure(f"{name}: a plain copy meanwhile", size / plain / 1e9, "GB/s", better="higher", repeats=repeats),
        Figure(f"{name}: of the plain copy", 100.0 * plain / pushed, "%", bar, "higher", repeats),
    ]


def verified(name: str, seconds: list[float], setting: Setting) -> list[Figure]:
    """The figure of a push whose checksums are compared."""
    return [Figure(f"{name}, with verify", statistics.median(seconds), "s", repeats=len(seconds))]


class Sharing:
    """Pushes of one part to one engine on the same device."""

    def __init__(self, setting: Setting, engine: StandIn, part: RankPart, device: torch.device) -> None:
        self._setting, self._engine, self._part, self._device = setting, engine, part, device

    def push(self, verify: bool = False) -> None:
        """One push, from the ranks' side to its end."""
        setting, engines = self._setting, ((0, self._engine.api),)
        stamp, dtype = new_stamp(1, None), as_dtype(setting.dtype)
        config = SyncConfig(bucket_mb=setting.bucket_mb, verify=verify, limit_s=_LIMIT_S)
        plan = SharePlan(stamp, "", dtype, config, engines, 1)
        sent = share(self._part, plan)
        assert sent is not None and sent.good, sent
        self._engine.end_push(Header(stamp))
        if verify:
            assert self._engine.checksums() == sent.digests, "what arrived is not what was sent"

    def first(self) -> float:
        """Seconds of the first push, once, to an engine that has its weights."""
        self._engine.checksums()
        return timed(self.push, self._device)

    def verified(self) -> list[float]:
        """Of pushes whose checksums are compared."""
        return all_s(lambda: self.push(verify=True), max(1, self._setting.repeats // 3), self._device)


def broadcast(setting: Setting, part: RankPart, shapes: dict[str, tuple[int, ...]], size: int) -> list[Figure]:
    """To an engine on another device: a second GPU, or on a CPU the same one."""
    backend = _BROADCASTS[part.device.type]
    name = f"broadcast by {backend}"
    if part.device.type == "cuda" and torch.cuda.device_count() < 2:
        return [Figure(name, None, "GB/s", better="higher", note="needs two GPUs")]
    there = device_of_rank(part.device, 1)
    with closing(StandIn(shapes, as_dtype(setting.dtype), there)) as engine:
        plan = GroupPlan(0, "bench", backend, "127.0.0.1", ((0, engine.api),), 1, _LIMIT_S, _LIMIT_S)
        joined = join(part, plan)
        assert joined is not None and joined.good, joined

        def push(verify: bool = False) -> None:
            stamp, dtype = new_stamp(1, None), as_dtype(setting.dtype)
            sent = send(part, plan, SendPlan(stamp, "", dtype, setting.bucket_mb, verify))
            assert sent is not None and sent.good, sent
            if verify:
                assert engine.checksums() == sent.digests, "what arrived is not what was sent"

        push(verify=True)
        seconds = statistics.median(all_s(push, setting.repeats, part.device))
        leave(part, plan.name)
    return [
        Figure(name, seconds, "s", repeats=setting.repeats),
        Figure(f"{name}: rate", size / seconds / 1e9, "GB/s", better="higher", repeats=setting.repeats),
    ]


def plain_copy(size: int, device: torch.device) -> Callable[[], object]:
    """One copy of `size` bytes from one place of the device's memory to another, in pieces of 1 GiB."""
    piece = min(size, 1 << 30)
    source = torch.ones(piece, dtype=torch.uint8, device=device)
    goal = torch.zeros(piece, dtype=torch.uint8, device=device)

    def copy() -> None:
        left = size
        while left > 0:
            count = min(piece, left)
            goal[:count].copy_(source[:count])
            left -= count

    return copy


def beside(
    plain: Callable[[], object],
    push: Callable[[], object],
    repeats: int,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> list[tuple[float, float]]:
    """Seconds of the plain copy and of a push, in turn, after one time that does not count; `before` is not timed."""
    seconds = []
    for _ in range(repeats + 1):
        before()
        seconds.append((timed(plain, device), timed(push, device)))
    return seconds[1:]


def all_s(work: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds of `work`, after one time that does not count."""
    return [timed(work, device) for _ in range(repeats + 1)][1:]


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done `work`."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait for what was asked of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def arguments() -> Setting:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None, help="another number of layers than the model's")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    if min(given.bucket_mb, given.repeats) < 1 or (given.layers is not None and given.layers < 1):
        parser.error("--bucket-mb, --repeats and --layers must be 1 or more")
    return Setting(**vars(given))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"bench_sync: {error}")
