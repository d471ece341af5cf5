"""A tensor in memory that an engine on the same machine opens: CUDA IPC on a GPU; what SGLang unpickles, no more.

The layout is that of SGLang's flattened buckets, one uint8 tensor and a description, in the pickle that its
MultiprocessingSerializer reads: functions of torch.multiprocessing that open memory by its handle, all on its own list
of allowed names. On a CPU the handle is that of a file in /dev/shm, by which this is tested.
Not measured on a GPU.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, multiprocessing
from torch.multiprocessing import reductions

from megasharp.serving.bucket import Header
from megasharp.serving.client.api import AsBytes

# Where reductions.rebuild_cuda_tensor takes the device's number.
_DEVICE = 6


def handle_of(header: Header, flat: Tensor) -> str:
    """The payload for one rank of one engine, base64; `flat` must live until the engine has answered.

    Each payload may be opened once: torch counts the openings.
    """
    raw = io.BytesIO()
    with _shared_by_name(flat):
        ForkingPickler(raw).dump([("header", AsBytes(header.to_json())), ("flat", _Handle(flat))])
    return base64.b64encode(raw.getvalue()).decode("ascii")


class _Handle:
    """Pickles as the tensor's handle. GPUs are named by their UUID: each process counts those that it sees."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)  # type: ignore[no-untyped-call]
        if self._tensor.is_cuda:
            uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
            arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
        return rebuild, arguments


@contextmanager
def _shared_by_name(tensor: Tensor) -> Iterator[None]:
    """A CPU tensor's memory is shared under a name: file descriptors reach only relatives of this process."""
    before = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if not tensor.is_cuda:
        multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
