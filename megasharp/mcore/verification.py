"""`megasharp convert verify`: whether two folders, of Hugging Face or of Megatron, hold the same model.

First the arguments, then every tensor's name, shape, dtype and bytes, then what both models make of the same random
tokens: a Hugging Face folder by transformers, a Megatron folder by megasharp's model and Megatron's own loader. Equal
logits say that the mapping is right, which equal bytes alone do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megasharp.convert.architecture import Architecture
from megasharp.convert.arguments import differences, model_arguments
from megasharp.convert.hashes import tensor_sha256
from megasharp.convert.hf_folder import CONFIG_FILE, HFReader
from megasharp.errors import UserError
from megasharp.mcore.conversion import DTYPES, MegatronWeights
from megasharp.mcore.layer_outputs import LOGITS, LayerOutputs, megatron_outputs, transformers_outputs
from megasharp.types import as_dtype

# Largest difference of an output, relative to the largest value of that output. Both sides hold the same weights; what
# is left is the order of their sums, and in the shorter dtypes the roundings between operations, which add up over
# layers. Measured on the quickstart's base (4 layers): 6e-7, 1.2e-2 and 1.5e-3.
TOLERANCES = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 8e-3}
_SHOWN = 5
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Probe:
    """Random tokens for the logits: the longest sequence's length, the seed, and the dtype of the computation."""

    tokens: int = 64
    seed: int = 0
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found, as lines to print, and whether both are the same model."""

    equal: bool
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What is compared of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two folders."""

    folder: Path
    is_megatron: bool
    architecture: Architecture
    tensors: Mapping[str, _Tensor]

    def outputs(self, sequences: Sequence[Tensor], dtype: torch.dtype) -> LayerOutputs:
        """What its model makes of the sequences."""
        if self.is_megatron:
            return megatron_outputs(self.folder / "policy", self.architecture, sequences, dtype)
        return transformers_outputs(self.folder, sequences, dtype)


def verify(one: Path, other: Path, probe: Probe | None) -> Verification:
    """Compare two folders; without `probe` no logits are computed, and no model is held in memory.

    Raises:
        UserError: a folder is damaged or not supported, or the probe asks for what is not offered.
    """
    if probe is not None and (probe.dtype not in DTYPES or probe.tokens < 2):
        raise UserError(f"--dtype {probe.dtype} --tokens {probe.tokens}: expected one of {', '.join(DTYPES)}, and 2 up")
    sides = _side(one), _side(other)
    found = [*_compare_arguments(*sides), *_compare_tensors(*sides)]
    count = len(sides[0].tensors)
    lines = [*found] or [f"arguments, and names, shapes, dtypes and SHA-256 of {count} tensors: equal"]
    comparable = _shapes(sides[0]) == _shapes(sides[1])
    if probe is None:
        lines.append("logits: not compared")
    elif not comparable:
        lines.append("logits: not compared, the models have other shapes")
    else:
        worst = _compare_outputs(*sides, probe)
        lines += worst.lines
        found += [] if worst.equal else worst.lines
    return Verification(not found, (*lines, "different" if found else "equal"))


def _side(folder: Path) -> _Side:
    if (folder / CONFIG_FILE).is_file():
        with HFReader(folder) as reader:
            tensors = {name: _describe(reader.tensor(name)) for name in reader.names()}
            return _Side(folder, False, reader.architecture, tensors)
    if (folder / "policy").is_dir():
        weights = MegatronWeights(folder)
        return _Side(folder, True, weights.architecture, {name: _describe(t) for name, t in weights.tensors()})
    raise UserError(f"{folder}: neither a Hugging Face folder nor a Megatron checkpoint folder")


def _describe(tensor: Tensor) -> _Tensor:
    return _Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor_sha256(tensor))


def _shapes(side: _Side) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in side.tensors.items()}


def _compare_arguments(one: _Side, other: _Side) -> list[str]:
    found = differences(model_arguments(one.architecture), model_arguments(other.architecture))
    return [f"argument {key}: {mine} in {one.folder}, {theirs} in {other.folder}" for key, mine, theirs in found]


def _compare_tensors(one: _Side, other: _Side) -> list[str]:
    """The first differences, layer by layer, and how many more there are."""
    names = sorted(one.tensors.keys() | other.tensors.keys(), key=_place)
    found = [line for name in names if (line := _compare_tensor(name, one, other))]
    more = [f"and {len(found) - _SHOWN} more tensors"] if len(found) > _SHOWN else []
    return [*found[:_SHOWN], *more]


def _place(name: str) -> tuple[int, int, str]:
    """The embedding, the layers by their numbers, and what follows them."""
    layer = _LAYER.search(name)
    return (1, int(layer[1]), name) if layer else (0 if "embed" in name else 2, 0, name)


def _compare_tensor(name: str, one: _Side, other: _Side) -> str | None:
    mine, theirs = one.tensors.get(name), other.tensors.get(name)
    if mine is None or theirs is None:
        return f"tensor {name}: missing from {one.folder if mine is None else other.folder}"
    for what in ("shape", "dtype", "sha256"):
        here, there = getattr(mine, what), getattr(theirs, what)
        if here != there:
            return f"tensor {name}: {what} {here} in {one.folder}, {there} in {other.folder}"
    return None


def _compare_outputs(one: _Side, other: _Side, probe: Probe) -> Verification:
    """The parts in the order in which they run: the first that differs, and the logits."""
    sequences = _sequences(one.architecture.vocab, probe)
    mine, theirs = (side.outputs(sequences, as_dtype(probe.dtype)) for side in (one, other))
    tolerance = TOLERANCES[probe.dtype]
    relative = {name: _relative(mine[name], theirs[name]) for name in mine}
    first = next((name for name, error in relative.items() if not error <= tolerance), None)
    largest = float((mine[LOGITS] - theirs[LOGITS]).abs().max())
    tokens = ", ".join(str(sequence.numel()) for sequence in sequences)
    lines = [
        f"logits of random sequences of {tokens} tokens in {probe.dtype}: largest difference {largest:.3g}, "
        f"{relative[LOGITS]:.3g} of the largest logit (tolerance {tolerance:g})"
    ]
    if first is not None:
        lines.append(f"first difference by layer: {first}, {relative[first]:.3g} of its largest value")
    return Verification(first is None, tuple(lines))


def _relative(mine: Tensor, theirs: Tensor) -> float:
    """NaN where either has one, so that it never passes."""
    return float((mine - theirs).abs().max() / mine.abs().max().clamp(min=torch.finfo(torch.float32).tiny))


def _sequences(vocab: int, probe: Probe) -> list[Tensor]:
    """Two, of different lengths, so that a packed row has more than one run."""
    generator = torch.Generator().manual_seed(probe.seed)
    lengths = (probe.tokens, probe.tokens // 2)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]
