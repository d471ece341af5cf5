"""Taking weights: files of `megasharp.serving.bucket` that another process on this machine wrote.

SGLang calls `load_bucket` in every rank for POST /update_weights_from_tensor with `load_format` set to its full name
and one tensor that spells the file's path. A version's tensors come in any number of files, and a last one without
tensors closes it. A file is checked whole (its checksums, every name and shape, its version) before the first weight
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from megasharp.serving.bucket import read_bucket, read_version
from megasharp.serving.engine.seams import get_serving
from megasharp.serving.engine.weights import known, slots_of

_TIED_HEAD = "lm_head.weight"


@dataclass(slots=True)
class _Receipt:
    """What has come of the version that is being received, or was last."""

    version: int
    names: set[str] = field(default_factory=set)


_receipts: WeakKeyDictionary[nn.Module, _Receipt] = WeakKeyDictionary()


def load_bucket(model: Any, payload: Sequence[tuple[str, Tensor]]) -> None:
    """Load one file. Raises ValueError, and changes nothing, for one that is damaged, unfit, or of an older version."""
    [(_, spelled)] = payload
    path = Path(bytes(spelled.tolist()).decode())
    version = read_version(path)
    receipt = _receipts.get(model)
    if receipt is None or version > receipt.version:
        receipt = _Receipt(version)
    refuse_older(version, receipt.version)
    refuse_older(version, get_serving().weight_version)
    tensors = list(read_bucket(path))
    if known(model):
        _check_names(model, tensors)
        if not tensors:
            _check_complete(model, receipt)
    model.load_weights(iter(tensors))
    receipt.names |= {name for name, _ in tensors}
    _receipts[model] = receipt


def refuse_older(version: object, served: object) -> None:
    """Raises ValueError where `version` is an older number than `served`, or its label; other labels have no order."""
    new, present = _number(version), _number(served)
    if new is not None and present is not None and new < present:
        raise ValueError(f"weights version {new} is older than {present}, which this engine has")


def _number(label: object) -> int | None:
    return int(str(label)) if str(label).isdecimal() else None


def _check_names(model: nn.Module, tensors: Sequence[tuple[str, Tensor]]) -> None:
    slots = slots_of(model)
    for name, tensor in tensors:
        if name.endswith(_TIED_HEAD) and name not in slots:
            continue  # A tied model's spare copy of its embedding; SGLang leaves it out too.
        if name not in slots:
            raise ValueError(f"the engine's model has no weight {name}")
        if tuple(tensor.shape) != slots[name].shape:
            raise ValueError(f"{name} came with shape {tuple(tensor.shape)}; the engine's is {slots[name].shape}")


def _check_complete(model: nn.Module, receipt: _Receipt) -> None:
    missing = slots_of(model).keys() - receipt.names
    if missing:
        raise ValueError(
            f"weights version {receipt.version} is not complete: {len(missing)} tensors did not come, "
            f"{min(missing)} among them"
        )
