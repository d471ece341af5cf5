"""A learner's first weights, under any layout: from a Hugging Face folder, from Megatron's shards, or drawn.

The first two give every parameter or raise, and refuse weights that are not finite in the learner's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import Family
from megasharp.convert.finite import is_finite
from megasharp.convert.hf_folder import HFReader, read_config
from megasharp.convert.lora import is_adapter
from megasharp.convert.model_folder import ModelFolder, model_folder
from megasharp.errors import UserError, one_line
from megasharp.mcore.parallel import Place
from megasharp.mcore.state import load_base
from megasharp.mcore.weights import global_parameters, load_hf

# Without them Megatron takes the folder for another kind of checkpoint.
_BESIDE_SHARDS = ("metadata.json", "common.pt")
_WHY = "no loss would be a number"


class FirstWeights(Protocol):
    """A source of weights, and the model that they are of."""

    family: Family
    architecture: Architecture

    def fill(self, chunks: Sequence[GPTModel], place: Place) -> None:
        """Fill this rank's parameters, cast to their dtype; adapters keep their values. All ranks must call it.

        Raises:
            UserError: the weights cannot be read, or are not finite.
        """
        ...


@contextmanager
def first_weights(folder: str | Path, drawn: bool = False) -> Iterator[FirstWeights]:
    """The weights of a folder of either kind; or `drawn` for the model that it describes, which takes no reading.

    Raises:
        UserError: it is none, or is damaged.
    """
    model = model_folder(Path(folder))
    if drawn:
        yield _Drawn(model)
    elif model.is_megatron:
        yield _Shards(model)
    else:
        with HFReader(model.path) as reader:
            yield _HuggingFace(reader)


def check_beside_shards(folder: Path) -> None:
    """Check the files that Megatron reads before its shards, which a conversion can do without.

    Raises:
        UserError: one of them is lost.
    """
    for name in _BESIDE_SHARDS:
        if not (folder / name).is_file():
            raise UserError(f"{folder}: these weights cannot be loaded: {name} is missing, copy the whole folder")


class _HuggingFace:
    """A checked Hugging Face folder; every rank reads whole tensors and keeps its part."""

    def __init__(self, reader: HFReader) -> None:
        self._reader = reader
        self.family, self.architecture = reader.family, reader.architecture

    def fill(self, chunks: Sequence[GPTModel], place: Place) -> None:
        """One tensor at a time."""
        load_hf(chunks, self._reader, self.family, self.architecture, place)
        not_finite = _first_not_finite(chunks)
        if not_finite is not None:
            raise UserError(self._fault(*not_finite))

    def _fault(self, parameter: str, dtype: torch.dtype) -> str:
        rule, layer = self.family.rule_for(self.architecture, parameter)
        names = [name.format(layer=layer) for name in rule.hf]
        # Where all are finite as they are stored, it is the learner's dtype that is too short.
        name = next((name for name in names if not is_finite(self._reader.tensor(name))), None)
        if name is not None:
            return f"{self._reader.file(name)}: tensor {name} holds NaN or infinite values: {_WHY}"
        where = f"{self._reader.file(names[0])}: tensor {' or '.join(names)}"
        return f"{where} holds values that are too large for {_name(dtype)}: set model.dtype to a wider one"


class _Shards:
    """torch_dist shards; Megatron reads of them what each rank needs."""

    def __init__(self, model: ModelFolder) -> None:
        self._folder = model.weights
        check_beside_shards(self._folder)
        _, self.family, self.architecture = read_config(model.description)

    def fill(self, chunks: Sequence[GPTModel], place: Place) -> None:
        """All at once, through Megatron's distributed checkpointing."""
        try:
            load_base(self._folder, chunks)
        # What torch and Megatron raise for damaged shards has no common kind.
        except Exception as error:
            raise UserError(f"{self._folder}: these weights cannot be loaded: {one_line(error)}") from error
        not_finite = _first_not_finite(chunks)
        if not_finite is not None:
            name, dtype = not_finite
            values = f"values that are NaN, infinite or too large for {_name(dtype)}"
            raise UserError(f"{self._folder}: tensor {name} holds {values}: {_WHY}")


class _Drawn:
    """Matrices with a standard deviation of 0.02, norms of 1, biases of 0: what a model has before it has learnt.

    For benchmarks: ranks draw on their own devices, each its own numbers, so that the model depends on the layout.
    """

    def __init__(self, model: ModelFolder) -> None:
        _, self.family, self.architecture = read_config(model.description)

    @torch.no_grad()
    def fill(self, chunks: Sequence[GPTModel], place: Place) -> None:
        """In place; adapters keep their values."""
        for name, parameter in global_parameters(chunks):
            if is_adapter(name):
                continue
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _first_not_finite(chunks: Sequence[GPTModel]) -> tuple[str, torch.dtype] | None:
    """The first parameter of this rank, by its global name, that is not a number throughout."""
    for name, parameter in global_parameters(chunks):
        if not is_adapter(name) and not is_finite(parameter.detach()):
            return name, parameter.dtype
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
