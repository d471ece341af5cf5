"""Whether a model folder still holds the weights it held: a digest of samples, for files too large to read whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from megasharp.convert.model_folder import ModelFolder
from megasharp.errors import UserError, one_line

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
