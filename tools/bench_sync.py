"""How fast weights reach an engine on the same GPU, beside a plain copy of as many bytes there.

    python tools/bench_sync.py --model qwen3-8b             # one GPU; weights are drawn
    python tools/bench_sync.py --model quickstart           # a CPU: handles of /dev/shm instead of CUDA's

The learner's side is what a run does for co-located engines (`sync/ipc_rank.py`): its stage's weights as Hugging Face
tensors, in flat buckets, handles of their memory to another process. The other process stands in for an engine: it
opens each handle as SGLang does, and copies every tensor to where its weights lie. HTTP and SGLang's own loading of
weights are not in the figures. In `verify` every tensor's SHA-256 is computed on both sides, which only a CPU can.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from results import Figure, report
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.multiprocessing import reductions

from megasharp.convert.hf_folder import read_config
from megasharp.convert.shards import expected_hf_shapes
from megasharp.convert.weight_files import CONFIG_FILE
from megasharp.mcore.first_weights import first_weights
from megasharp.mcore.model import build_chunks, transformer_config
from megasharp.mcore.parallel import Place, device_of_rank, initialize, meet, megatron_device
from megasharp.mcore.weights import export_stage
from megasharp.serving.bucket import checksum, new_stamp, parse_header, unflattened
from megasharp.serving.client.api import EngineApi, Refused
from megasharp.sync.ipc_rank import SharePlan, share
from megasharp.types import ParallelLayout, as_dtype

REPOSITORY = Path(__file__).resolve().parents[1]
BAR = 70.0
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured: `layers` other than the model's, buckets of `bucket_mb` MiB."""

    model: str
    layers: int | None
    dtype: str
    bucket_mb: int
    repeats: int


class Part:
    """One rank's weights without an optimizer; satisfies `RankPart`."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        with megatron_device(device), first_weights(folder, drawn=True) as source:
            self.place: Place = initialize(ParallelLayout(), seed=0)
            self._family, self._architecture = source.family, source.architecture
            config = transformer_config(source.architecture, ParallelLayout(), dtype, "none", {})
            self._chunks = build_chunks(config, source.architecture, self.place)
            for chunk in self._chunks:
                chunk.to(device)
            source.fill(self._chunks, self.place)

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """All weights, as a run's learner gives them."""
        return export_stage(self._chunks, self._family, self._architecture, self.place, everywhere)


class Receiver:
    """The other process, as `share` calls an engine."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def load_handles(self, payloads: list[str], limit: float) -> Refused | None:
        """Hand the bucket over; returns when its tensors are copied."""
        self._connection.send(payloads[0])
        if not self._connection.poll(limit):
            return Refused("no answer")
        answer = self._connection.recv()
        return None if answer is None else Refused(answer)

    def verify(self) -> dict[str, str]:
        """The checksums of what it holds."""
        self._connection.send(None)
        return cast(dict[str, str], self._connection.recv())

    def end(self) -> None:
        """Have it end."""
        self._connection.send("")


def receive(connection: Connection, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: str) -> None:
    """The other process: hold weights, open what comes, copy it."""
    torch.set_num_threads(1)
    held = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    with devices_by_uuid():
        while True:
            message = connection.recv()
            if message == "":
                return
            if message is None:
                connection.send({name: checksum(tensor) for name, tensor in held.items()})
                continue
            try:
                copy_bucket(message, held)
            except Exception as error:
                connection.send(repr(error))
            else:
                connection.send(None)


def copy_bucket(payload: str, held: dict[str, Tensor]) -> None:
    """Open the bucket's memory and copy its tensors."""
    named = dict(pickle.load(io.BytesIO(base64.b64decode(payload))))
    header = parse_header(bytes(named["header"].tolist()))
    for name, tensor in unflattened(header.tensors, named["flat"]):
        held[name].copy_(tensor)
    if named["flat"].is_cuda:
        torch.cuda.synchronize()


@contextmanager
def devices_by_uuid() -> Iterator[None]:
    """Handles name a GPU by its UUID, as SGLang reads them; torch wants this process's number of it."""
    rebuild = reductions.rebuild_cuda_tensor

    def by_number(*arguments: object) -> Tensor:
        numbers = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        return cast(Tensor, rebuild(*[numbers.get(str(each), each) for each in arguments]))  # type: ignore[no-untyped-call]

    reductions.rebuild_cuda_tensor = by_number
    try:
        yield
    finally:
        reductions.rebuild_cuda_tensor = rebuild


def main() -> None:
    """Measure and print."""
    setting = arguments()
    device = device_of_rank(torch.device("cuda" if torch.cuda.is_available() else "cpu"), 0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet(HashStore(), 0, 1, device)
    with tempfile.TemporaryDirectory() as name:
        folder = describe(setting, Path(name))
        _, family, architecture = read_config(folder)
        shapes = {name: tuple(shape) for name, shape in expected_hf_shapes(family, architecture).items()}
        dtype = as_dtype(setting.dtype)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=receive, args=(theirs, shapes, dtype, str(device)), daemon=True)
        process.start()
        measure(setting, Part(folder, dtype, device), Receiver(ours), device)
        process.join(_LIMIT_S)
    dist.destroy_process_group()


def measure(setting: Setting, part: Part, receiver: Receiver, device: torch.device) -> None:
    """The table and its JSON."""
    size = sum(tensor.nbytes for _, tensor in part.export_weights())

    def push(verify: bool = False) -> None:
        stamp = new_stamp(1, None)
        engines = ((0, cast(EngineApi, receiver)),)
        plan = SharePlan(stamp, "", as_dtype(setting.dtype), setting.bucket_mb, verify, engines, 1, _LIMIT_S)
        sent = share(part, plan)
        assert sent is not None and sent.good, sent
        if verify:
            assert receiver.verify() == sent.digests, "what arrived is not what was sent"

    push(verify=True)
    pushed = median_s(push, setting.repeats, device)
    verified = median_s(lambda: push(verify=True), max(1, setting.repeats // 3), device)
    receiver.end()
    copied = median_s(plain_copy(size, device), setting.repeats, device)
    ratio = 100.0 * copied / pushed
    figures = [
        Figure("plain copy on the device", size / copied / 1e9, "GB/s", better="higher", repeats=setting.repeats),
        Figure("sync by handles", size / pushed / 1e9, "GB/s", better="higher", repeats=setting.repeats),
        # The bar is for GPUs, where handles are of memory that exists; on a CPU the kernel makes new pages for them.
        Figure("of the plain copy", ratio, "%", BAR if device.type == "cuda" else None, "higher", setting.repeats),
        Figure("seconds a sync", pushed, "s", repeats=setting.repeats),
        Figure("seconds a sync with verify", verified, "s", repeats=max(1, setting.repeats // 3)),
        Figure("sync by NCCL between GPUs", None, "GB/s", better="higher", note="needs two GPUs and SGLang"),
    ]
    shown = {name: getattr(setting, name) for name in Setting.__slots__} | {"bytes": size}
    report("bench_sync", figures, shown)


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


def median_s(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of `work` until the device has done it; one more time first, which does not count."""
    seconds = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def describe(setting: Setting, folder: Path) -> Path:
    """A folder with the model's config.json."""
    named = REPOSITORY / "examples" / "quickstart" / "base" if setting.model == "quickstart" else Path(setting.model)
    found = named if (named / CONFIG_FILE).is_file() else REPOSITORY / "configs" / "model" / setting.model
    config = json.loads((found / CONFIG_FILE).read_text())
    if setting.layers is not None:
        config |= {"num_hidden_layers": setting.layers}
        config.pop("layer_types", None)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def arguments() -> Setting:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None, help="another number of layers than the model's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    return Setting(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
