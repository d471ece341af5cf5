"""How buckets of weights reach every engine of a fleet on this machine: through shared memory, or through a folder.

Whatever the way, an engine that fails or refuses any part of a push is lost: it may hold half of the new weights.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from safetensors.torch import save_file
from torch import Tensor

from megasharp.errors import UserError, one_line
from megasharp.serving.bucket import write_bucket
from megasharp.serving.client.api import EngineApi, EngineFailed, InFlight, Refused
from megasharp.serving.client.health import Lost
from megasharp.serving.client.members import Member, Members

Bucket = Sequence[tuple[str, Tensor]]
Action = Callable[[EngineApi], Refused | None]
SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "megasharp-weights-"
_MIB = 1 << 20


class Transport(Protocol):
    """One push: `begin`, `send` for every bucket in order, `end`; or `abandon` after an error in between."""

    def begin(self, version: int) -> None:
        """Make the engines ready for all weights of `version`."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Bring some of the weights, CPU tensors, to every engine."""
        ...

    def end(self) -> None:
        """The weights are complete: the engines serve them when this returns."""
        ...

    def abandon(self) -> None:
        """Leave nothing behind and let the engines go on; what they hold is not to be served."""
        ...


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """How weights are pushed. `verify` sends a checksum with every tensor, which the engine compares.

    `bucket_mb` (MiB) bounds what is in flight at once. `folder` is where the transport writes: null for /dev/shm, and
    required for disk. `in_flight` is what becomes of running requests: `retract` computes their cache again with the
    new weights, `in_place` goes on with what they have.
    """

    transport: Literal["shared_memory", "disk"] = "shared_memory"
    bucket_mb: int = 512
    verify: bool = False
    in_flight: InFlight = "retract"
    folder: Path | None = None


class Receivers:
    """The engines that take part in a push; `each` has all of them do the same at the same time."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def each(self, what: str, action: Action) -> None:
        """Every engine alive does `action`; one that fails or refuses is lost.

        Raises UserError when none is left, with what each said.
        """
        taking = self._members.alive()
        if not taking:
            raise self._members.none_left()
        with ThreadPoolExecutor(len(taking)) as pool:
            failures = list(pool.map(lambda member: _attempt(member, action), taking))
        said = []
        for member, failure in zip(taking, failures, strict=True):
            if failure is not None:
                self._members.observe(member, Lost(f"{what}: {failure}"))
                said.append(f"{member.name}: {self._members.describe(member)}")
        if len(said) == len(taking):
            raise UserError(f"no engine is left that takes weights; {what} failed: {'; '.join(said)}")

    def release(self) -> None:
        """Have engines that were stopped in the middle of a push go on; whether they do is the watch's matter."""
        for member in self._members.alive():
            for action in (EngineApi.end_update, EngineApi.proceed):
                with contextlib.suppress(EngineFailed):
                    action(member.process.api)


def _attempt(member: Member, action: Action) -> str | None:
    """What went wrong, or None."""
    try:
        refused = action(member.process.api)
    except EngineFailed as error:
        return member.process.exit_reason() or str(error)
    return None if refused is None else f"refused: {refused.message}"


class SharedMemory:
    """Each bucket is one file of `megasharp.serving.bucket` in memory, which all engines read at the same time."""

    def __init__(self, receivers: Receivers, settings: SyncSettings, ranks: int) -> None:
        self._receivers = receivers
        self._settings = settings
        self._ranks = ranks
        self._version = -1
        parent = settings.folder or SHARED_MEMORY
        _remove_orphans(parent)
        self._folder = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"

    def begin(self, version: int) -> None:
        self._version = version
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = self._settings.in_flight
        self._receivers.each("pause", lambda api: api.pause(mode))
        self._receivers.each("begin of the weight update", EngineApi.begin_update)

    def send(self, bucket: Bucket) -> None:
        self._load(bucket, None)

    def end(self) -> None:
        # Only now may the engines call what they hold by its version.
        self._load([], self._version)
        self._receivers.each("end of the weight update", EngineApi.end_update)
        _go_on(self._receivers, self._settings.in_flight)
        self._folder.rmdir()

    def abandon(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._receivers.release()

    def _load(self, bucket: Bucket, label: int | None) -> None:
        path = self._folder / "bucket"
        try:
            write_bucket(path, self._version, bucket, checksums=self._settings.verify)
        except OSError as error:
            raise UserError(
                f"{path}: cannot write a bucket of weights ({one_line(error)}); lower sync.bucket_mb "
                f"({self._settings.bucket_mb}), enlarge {self._folder.parent}, or use sync.transport: disk"
            ) from error
        try:
            self._receivers.each("load of weights", lambda api: api.load_bucket(path, self._ranks, label))
        finally:
            path.unlink(missing_ok=True)


class Disk:
    """All buckets become the files of one Hugging Face folder, which the engines then load whole."""

    def __init__(self, receivers: Receivers, settings: SyncSettings) -> None:
        assert settings.folder is not None
        self._receivers = receivers
        self._settings = settings
        self._parent = settings.folder
        self._folder = self._parent
        self._version = -1
        self._files = 0

    def begin(self, version: int) -> None:
        self._version, self._files = version, 0
        self._folder = self._parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._folder.mkdir(parents=True)

    def send(self, bucket: Bucket) -> None:
        path = self._folder / f"model-{self._files:05d}.safetensors"
        self._files += 1
        try:
            # Copies: the format refuses tensors that share memory, as tied weights do.
            save_file({name: tensor.clone() for name, tensor in bucket}, path)
        except Exception as error:
            raise UserError(
                f"{path}: cannot write weights ({one_line(error)}); free space or mend the folder"
            ) from error

    def end(self) -> None:
        mode = self._settings.in_flight
        self._receivers.each("pause", lambda api: api.pause(mode))
        self._receivers.each("load of weights", lambda api: api.load_folder(self._folder, self._version))
        _go_on(self._receivers, mode)
        shutil.rmtree(self._folder)

    def abandon(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._receivers.release()


def make_transport(members: Members, settings: SyncSettings, ranks: int) -> Transport:
    """The transport that the settings name; `ranks` is the number of processes per engine that load weights."""
    receivers = Receivers(members)
    if settings.transport == "shared_memory":
        return SharedMemory(receivers, settings, ranks)
    if settings.folder is None:
        raise UserError("sync.transport: disk needs a folder that engines can read")
    return Disk(receivers, settings)


def buckets(tensors: Iterable[tuple[str, Tensor]], limit_mb: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in order, on the CPU, in lists of at most `limit_mb` MiB; a larger tensor is a list of its own."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit_mb * _MIB:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach().cpu()))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _go_on(receivers: Receivers, mode: InFlight) -> None:
    """Let the engines sample again. What they cached was computed with the old weights: forgotten, unless in place."""
    if mode == "retract":
        receivers.each("flush of the cache", EngineApi.flush)
    receivers.each("continue", EngineApi.proceed)


def _remove_orphans(parent: Path) -> None:
    """Buckets of trainers that were killed in a push: in /dev/shm they would take memory until the machine restarts."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
