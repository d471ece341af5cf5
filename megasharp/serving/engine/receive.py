"""Taking weights in every rank of an engine, whichever way they come; nothing older, unfit or incomplete is served.

SGLang calls `load_bucket` for POST /update_weights_from_tensor with `load_format` set to its full name. What it then
unpickles, with its own list of allowed names, is one of three things:

    [("file", path as bytes)]                           a file of `megasharp.serving.bucket` on this machine
    [("header", JSON as bytes), ("flat", uint8 [B])]    a bucket in memory shared by its sender, on this machine
    [("announced", JSON as bytes)]                      the header of what a broadcast brings next

Bytes are uint8 tensors. A version's tensors come in any number of buckets, and an announcement without tensors closes
it. Headers and files are checked whole (versions, every name and shape, checksums) before the first weight changes; a
broadcast that was not announced is refused. Weights from a folder are checked by the header that lies in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from megasharp.protocols import MEMORY_PREFIX
from megasharp.serving.bucket import (
    FOLDER_HEADER,
    Entry,
    Header,
    Stamp,
    parse_header,
    read_bucket,
    read_header,
    unflattened,
)
from megasharp.serving.engine.seams import get_serving
from megasharp.serving.engine.weights import known, slots_of

_TIED_HEAD = "lm_head.weight"


@dataclass(slots=True)
class _Receipt:
    """What has come of the push under way, or of the last; `memory_version` is the newest that ever came."""

    stamp: Stamp
    memory_version: int | None
    names: set[str] = field(default_factory=set)
    announced: tuple[Entry, ...] = ()


_receipts: WeakKeyDictionary[nn.Module, _Receipt] = WeakKeyDictionary()


def load_bucket(model: Any, payload: Sequence[tuple[str, Tensor]]) -> None:
    """Load one bucket.

    Raises ValueError, and changes nothing, for one that is damaged, unfit, or of an older version.
    """
    (kind, spelled), *rest = payload
    text = bytes(spelled.tolist()).decode()
    if kind == "announced":
        header = parse_header(text)
        receipt = _accepted(model, header)
        receipt.announced = header.tensors
        _receipts[model] = receipt
        return
    if kind == "file":
        header, tensors = read_header(Path(text)), list(read_bucket(Path(text)))
    else:
        [(_, flat)] = rest
        header = parse_header(text)
        tensors = list(unflattened(header.tensors, flat))
    receipt = _accepted(model, header)
    model.load_weights(iter(tensors))
    receipt.names |= {name for name, _ in tensors}
    _receipts[model] = receipt


def check_broadcast(model: Any, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> None:
    """Raises ValueError unless exactly these tensors were announced; they count as come."""
    receipt = _receipts.get(model)
    announced = () if receipt is None else receipt.announced
    found = [(name, str(dtype), tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)]
    if receipt is None or not announced or found != [(each.name, each.dtype, each.shape) for each in announced]:
        raise ValueError(f"a broadcast of {len(names)} tensors was not announced")
    receipt.announced = ()
    receipt.names |= set(names)


def check_folder(model: Any, folder: Path, label: object) -> None:
    """Raises ValueError for a folder of an older version, or of weights that do not fit or are not complete."""
    refuse_older(label, get_serving().weight_version)
    path = folder / FOLDER_HEADER
    if not path.is_file():
        return  # A plain checkpoint: SGLang judges it.
    header = parse_header(path.read_bytes())
    receipt = _accepted(model, header)
    receipt.names |= {entry.name for entry in header.tensors}
    if known(model):
        _check_complete(model, receipt)
    _receipts[model] = receipt


def refuse_older(version: object, served: object, whose: str = "weights") -> None:
    """Raises ValueError where `version` is an older number than `served`, or its label; other labels have no order."""
    new, present = _number(version), _number(served)
    if new is not None and present is not None and new < present:
        raise ValueError(f"{whose} version {new} is older than {present}, which this engine has")


def _number(label: object) -> int | None:
    return int(str(label)) if str(label).isdecimal() else None


def _accepted(model: Any, header: Header) -> _Receipt:
    """The receipt of the header's push, once the header is found to be fit."""
    stamp, receipt = header.stamp, _receipts.get(model)
    refuse_older(stamp.version, get_serving().weight_version)
    newest = None
    if receipt is not None:
        newest = receipt.memory_version
        refuse_older(stamp.version, receipt.stamp.version)
        refuse_older(stamp.memory_version, newest, "memory")
    if receipt is None or stamp != receipt.stamp:
        receipt = _Receipt(stamp, newest if stamp.memory_version is None else stamp.memory_version)
    if known(model):
        _check_names(model, header)
        if not header.tensors:
            _check_complete(model, receipt)
    return receipt


def _check_names(model: nn.Module, header: Header) -> None:
    slots = slots_of(model)
    for entry in header.tensors:
        if entry.name.startswith(MEMORY_PREFIX) and header.stamp.memory_version is None:
            raise ValueError(f"{entry.name} came in a push that names no memory version")
        if entry.name.endswith(_TIED_HEAD) and entry.name not in slots:
            continue  # A tied model's spare copy of its embedding; SGLang leaves it out too.
        if entry.name not in slots:
            raise ValueError(f"the engine's model has no weight {entry.name}")
        if entry.shape != slots[entry.name].shape:
            raise ValueError(f"{entry.name} came with shape {entry.shape}; the engine's is {slots[entry.name].shape}")


def _check_complete(model: nn.Module, receipt: _Receipt) -> None:
    wanted = set(slots_of(model))
    if receipt.stamp.memory_version is None:
        wanted = {name for name in wanted if not name.startswith(MEMORY_PREFIX)}
    missing = wanted - receipt.names
    if missing:
        raise ValueError(
            f"weights version {receipt.stamp.version} is not complete: {len(missing)} tensors did not come, "
            f"{min(missing)} among them"
        )
