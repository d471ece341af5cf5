"""Digests of weights, and `conversion.json`: the record of a converted folder's source and weights.

Weights are identified by SHA-256: of each tensor's bytes in its Hugging Face layout and of all of them, or, for files
too large to read whole, of samples. They are also checked for numbers that are not finite: one NaN in a checkpoint
makes every loss NaN, without a word of where. A run's checkpoint has a manifest of another kind and name; its model's
arguments are in `arguments.json`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megasharp import __version__
from megasharp.common.errors import UserError, one_line, reason_at
from megasharp.common.formats import FORMATS, read_stamp
from megasharp.common.section import Section
from megasharp.convert.architecture import Architecture, Arguments, model_arguments, read_arguments
from megasharp.convert.model_folder import ModelFolder


def is_finite(tensor: Tensor) -> bool:
    """Return True where no element is NaN or infinite; takes no memory of the tensor's size."""
    if not tensor.numel():
        return True
    # Where one element is NaN, both are.
    low, high = tensor.aminmax()
    return bool(torch.isfinite(low) and torch.isfinite(high))


def tensor_sha256(tensor: Tensor) -> str:
    """Return the hex digest of a tensor's elements in row-major order; it says nothing of shape or dtype."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def weights_sha256(tensors: Mapping[str, str]) -> str:
    """Return the hex digest of a whole model, by its tensors' names and digests; files and their order do not count."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(tensors.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


_KINDS = (".safetensors", ".distcp")
_PIECE = 65536
_PIECES = 16


def weights_fingerprint(folder: ModelFolder) -> str:
    """Return the SHA-256 of the weight files' names, sizes, and 16 pieces of 64 KiB of each, from start to end.

    Other weights, such as those of a later checkpoint, differ everywhere; a single changed byte may not be seen.
    Raises UserError where a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(path for path in folder.weights.iterdir() if path.suffix in _KINDS):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for number in range(_PIECES):
                    # Evenly spread: the first piece begins the file, the last ends it.
                    file.seek(max(0, size - _PIECE) * number // (_PIECES - 1))
                    digest.update(file.read(_PIECE))
    except OSError as error:
        raise UserError(f"{folder.weights} cannot be read: {one_line(error)}") from error
    return digest.hexdigest()


CONVERSION_FILE = "conversion.json"
SOFTWARE = ("torch", "megatron-core", "transformers")
Kind = Literal["hf-to-megatron", "megatron-to-hf", "megatron-to-peft"]


class Conversion(Section):
    """One conversion, as `conversion.json` holds it.

    `source` is the folder's absolute path. `weights_sha256` is the digest of all of the source's weights, `tensors` has
    one for each by its Hugging Face name, in `source_dtype`; of "megatron-to-peft" they are the adapters, by PEFT's
    names. `dtype` is that of the written weights, `rounded` has the digests of the tensors that were rounded to it.
    `arguments` are the model's by config.json's names, `software` the versions that took part.
    """

    kind: Kind
    source: str
    weights_sha256: str
    tensors: dict[str, str]
    rounded: dict[str, str] = {}
    source_dtype: str
    dtype: str
    family: str
    arguments: Arguments
    software: dict[str, str]


def software_versions() -> dict[str, str]:
    """Return the versions that matter for reading a checkpoint again."""
    return {"megasharp": __version__, **{name: importlib.metadata.version(name) for name in SOFTWARE}}


@dataclass(frozen=True, slots=True)
class Digests:
    """SHA-256 of tensors by Hugging Face name, as they were read, and of those that were rounded, as they were written.

    `not_finite` are the names of those that hold a NaN or an infinity as they were written. All fill while tensors are
    converted.
    """

    read: dict[str, str] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor, written: torch.dtype) -> None:
        """Note one tensor, which is written in that dtype."""
        self.read[name] = tensor_sha256(tensor)
        result = tensor.to(written)
        if tensor.dtype != written:
            self.rounded[name] = tensor_sha256(result)
        if not is_finite(result):
            self.not_finite.append(name)


def write_record(
    folder: Path,
    kind: Kind,
    source: Path,
    arch: Architecture,
    digests: Digests,
    source_dtype: str,
    dtype: str,
) -> None:
    """Write the record into the folder of a finished conversion."""
    record = Conversion(
        kind=kind,
        source=str(source.absolute()),
        weights_sha256=weights_sha256(digests.read),
        tensors=digests.read,
        rounded=digests.rounded,
        source_dtype=source_dtype,
        dtype=dtype,
        family=arch.family,
        arguments=model_arguments(arch),
        software=software_versions(),
    )
    tree = {"format": FORMATS["conversion"], **record.model_dump(mode="json")}
    (folder / CONVERSION_FILE).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path) -> Conversion | None:
    """Read the record of a converted folder; None where there is none.

    Raises:
        UserError: the file is not one, or is of a later release.
    """
    path = folder / CONVERSION_FILE
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        read_stamp(path, "conversion", tree)
        # Format 1 (91aa241, 2026-11-21, to 255d13e, 2026-11-24) has no `format`; its first records lack `rounded`.
        tree.pop("format", None)
        return Conversion.model_validate(tree)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: not a record of a conversion that this version reads: {reason_at(error, path)}"
        ) from error


def recorded_arguments(folder: Path) -> Arguments | None:
    """Read the model's arguments as a converted folder or a run's checkpoint recorded them; None where neither did.

    Raises:
        UserError: the record cannot be read, or the folder is a checkpoint of a later release.
    """
    record = read_record(folder)
    # Weights of a checkpoint whose manifest is damaged can still be read.
    with suppress(OSError, ValueError, AttributeError):
        path = folder / "manifest.json"
        read_stamp(path, "checkpoint", json.loads(path.read_bytes()))
    return read_arguments(folder) if record is None else record.arguments
