"""Whether a model folder still holds the weights it held: a digest of samples, for files too large to read whole.

Whether weights are numbers: one NaN or infinity in a checkpoint makes every loss NaN, without a word of where.

SHA-256 of weights: of each tensor's bytes in its Hugging Face layout, and of all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megasharp.common.errors import UserError, one_line
from megasharp.convert.model_folder import ModelFolder


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; takes no memory of the tensor's size."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return bool(torch.isfinite(low) and torch.isfinite(high))


def tensor_sha256(tensor: Tensor) -> str:
    """Hex digest of a tensor's elements in row-major order; says nothing of shape or dtype."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def weights_sha256(tensors: Mapping[str, str]) -> str:
    """Hex digest of a whole model, from its tensors' names and digests; files and their order do not count."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(tensors.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


_KINDS = (".safetensors", ".distcp")
_PIECE = 65536
_PIECES = 16


def weights_fingerprint(folder: ModelFolder) -> str:
    """SHA-256 of the weight files' names, sizes, and 16 pieces of 64 KiB of each, the first and the last among them.

    Other weights, such as those of a later checkpoint, differ everywhere; a single changed byte may not be seen.
    Raises UserError where a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(path for path in folder.weights.iterdir() if path.suffix in _KINDS):
            _sample(path, digest.update)
    except OSError as error:
        raise UserError(f"{folder.weights} cannot be read: {one_line(error)}") from error
    return digest.hexdigest()


def _sample(path: Path, add: Callable[[bytes], None]) -> None:
    size = path.stat().st_size
    add(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
        for number in range(_PIECES):
            file.seek(max(0, size - _PIECE) * number // (_PIECES - 1))
            add(file.read(_PIECE))
