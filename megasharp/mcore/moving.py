"""Records to another device, with every tensor inside them."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch
from torch import Tensor

_Record = TypeVar("_Record")


def moved(record: _Record, device: torch.device) -> _Record:
    """The dataclass record with its tensors, and those of records inside it, on `device`; itself on the CPU.

    What is on the CPU is page-locked first, so that the copy does not wait for what the GPU is doing.
    """
    if device.type == "cpu":
        return record
    values = {field.name: _moved(getattr(record, field.name), device) for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    return dataclasses.replace(record, **values)  # type: ignore[type-var]


def _moved(value: object, device: torch.device) -> object:
    if isinstance(value, Tensor):
        return value.pin_memory().to(device, non_blocking=True) if value.device.type == "cpu" else value.to(device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return moved(value, device)
    return type(value)(_moved(item, device) for item in value) if isinstance(value, list | tuple) else value
