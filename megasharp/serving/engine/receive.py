"""Taking weights in every rank of an engine, whichever way they come; nothing older, unfit or incomplete is served.

SGLang calls `load_bucket` for POST /update_weights_from_tensor with `load_format` set to its full name. What it then
unpickles, with its own list of allowed names, is one of four things:

    [("file", path as bytes)]                               a file of `megasharp.serving.bucket` on this machine
    [("header", JSON as bytes), ("memory", JSON as bytes)]  a bucket, and the lent memory that it begins
    [("loan", JSON as bytes)]                               a network's weights where their owner has them
    [("announced", JSON as bytes)]                          the header of what a broadcast brings next

Bytes are uint8 tensors; lent memory is `megasharp.serving.lending`'s. What one rank refuses, all refuse. A version's
tensors come in any number of buckets; an announcement or a file without any closes it. Headers, loans and files are
checked whole (versions, every name and shape, checksums) before the first weight changes; a broadcast that was not
announced is refused. Weights from a folder are checked by the header that lies in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megasharp.protocols import MEMORY_PREFIX
from megasharp.serving.borrowing import Borrower
from megasharp.serving.bucket import (
    FOLDER_HEADER,
    TIED_HEAD,
    Entry,
    Header,
    Stamp,
    parse_header,
    read_bucket,
    read_header,
    unflattened,
)
from megasharp.serving.engine.ranks import on_all_ranks
from megasharp.serving.engine.seams import get_serving
from megasharp.serving.engine.weights import goals_of, known, slots_of
from megasharp.serving.lending import parse_loan, parse_memory


@dataclass(slots=True)
class _Receipt:
    """What has come of the push under way, or of the last; `memory_version` is the newest that ever came."""

    stamp: Stamp
    memory_version: int | None
    names: set[str] = field(default_factory=set)
    announced: tuple[Entry, ...] = ()


_receipts: WeakKeyDictionary[nn.Module, _Receipt] = WeakKeyDictionary()
_borrowers: WeakKeyDictionary[nn.Module, Borrower] = WeakKeyDictionary()


def load_bucket(model: Any, payload: Sequence[tuple[str, Tensor]]) -> None:
    """Load one bucket, or one network's lent weights; nobody reads the sender's memory any more when it returns.

    Raises ValueError, and changes nothing, for one that is damaged, unfit, or of an older version.
    """
    kind, *texts = payload[0][0], *(bytes(spelled.tolist()).decode() for _, spelled in payload)
    on_all_ranks(lambda: _LOADS[kind](model, *texts))


def _announce(model: Any, text: str) -> None:
    _close_or_expect(model, parse_header(text))


def _close_or_expect(model: Any, header: Header) -> None:
    receipt = _accepted(model, header.stamp)
    if known(model):
        _check_names(model, header)
        if not header.tensors:
            _check_complete(model, receipt)
    if not header.tensors:
        _borrower(model).end_push()
    receipt.announced = header.tensors
    _receipts[model] = receipt


def _load_file(model: Any, path: str) -> None:
    header = read_header(Path(path))
    if header.tensors:
        _load(model, header, list(read_bucket(Path(path))))
    else:
        _close_or_expect(model, header)


def _load_flat(model: Any, text: str, memory: str) -> None:
    header = parse_header(text)
    (flat,) = _borrower(model).storages(parse_memory(memory), header.stamp.push)
    _load(model, header, list(unflattened(header.tensors, flat)))
    _wait()


def _load(model: Any, header: Header, tensors: list[tuple[str, Tensor]]) -> None:
    receipt = _accepted(model, header.stamp)
    if known(model):
        _check_names(model, header)
    model.load_weights(iter(tensors))
    receipt.names |= {name for name, _ in tensors}
    _receipts[model] = receipt


def _borrow(model: Any, text: str) -> None:
    loan = parse_loan(text)
    receipt = _accepted(model, loan.stamp)
    places = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    borrower = _borrower(model)
    names = borrower.prepare(loan, lambda: goals_of(model), places)
    if loan.stamp.memory_version is None and any(name.startswith(MEMORY_PREFIX) for name in names):
        raise ValueError("weights of a memory network came in a push that names no memory version")
    borrower.copy(loan)
    _wait()
    receipt.names |= names
    _receipts[model] = receipt


_LOADS: dict[str, Callable[..., None]] = {
    "file": _load_file,
    "header": _load_flat,
    "loan": _borrow,
    "announced": _announce,
}


def _borrower(model: nn.Module) -> Borrower:
    return _borrowers.setdefault(model, Borrower())


def _wait() -> None:
    """The sender may change its memory as soon as it is answered."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


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
    receipt = _accepted(model, header.stamp)
    receipt.names |= {entry.name for entry in header.tensors}
    if known(model):
        _check_names(model, header)
        _check_complete(model, receipt)
    _receipts[model] = receipt


def refuse_older(version: object, served: object, whose: str = "weights") -> None:
    """Raises ValueError where `version` is an older number than `served`, or its label; other labels have no order."""
    new, present = _number(version), _number(served)
    if new is not None and present is not None and new < present:
        raise ValueError(f"{whose} version {new} is older than {present}, which this engine has")


def _number(label: object) -> int | None:
    return int(str(label)) if str(label).isdecimal() else None


def _accepted(model: Any, stamp: Stamp) -> _Receipt:
    """The receipt of a push, once it is found to be no older than what is here."""
    receipt = _receipts.get(model)
    refuse_older(stamp.version, get_serving().weight_version)
    newest = None
    if receipt is not None:
        newest = receipt.memory_version
        refuse_older(stamp.version, receipt.stamp.version)
        refuse_older(stamp.memory_version, newest, "memory")
    if receipt is None or stamp != receipt.stamp:
        receipt = _Receipt(stamp, newest if stamp.memory_version is None else stamp.memory_version)
    return receipt


def _check_names(model: nn.Module, header: Header) -> None:
    slots = slots_of(model)
    for entry in header.tensors:
        if entry.name.startswith(MEMORY_PREFIX) and header.stamp.memory_version is None:
            raise ValueError(f"{entry.name} came in a push that names no memory version")
        if entry.name.endswith(TIED_HEAD) and entry.name not in slots:
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
