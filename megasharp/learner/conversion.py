"""Convert a Hugging Face folder to a Megatron checkpoint folder and back, one tensor in memory at a time.

A Megatron folder holds `policy/` (torch_dist shards, loadable at any TP x PP) and `hf/` (config and tokenizer files),
so it can be turned back without anything else. A run's checkpoints have the same two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.common.exit_codes import note
from megasharp.common.files import completed_folder, folder_errors
from megasharp.common.records import as_dtype, dtype_name
from megasharp.config.hub import hub_model
from megasharp.config.policy import LoraConfig
from megasharp.convert.architecture import Architecture, check_arguments
from megasharp.convert.hf_folder import HFReader, hf_tensors, megatron_tensor, read_config
from megasharp.convert.hf_write import MAX_SHARD_BYTES, carry_over, fill_hf_folder, set_dtype
from megasharp.convert.lora import (
    ADAPTER_NAMES,
    is_adapter,
    merged,
    recorded_adapters,
    recorded_base,
    rows_of,
    target_of,
)
from megasharp.convert.model_folder import (
    ADAPTER_CONFIG,
    CONFIG_FILE,
    Projection,
    fill_peft_folder,
    model_folder,
    what_it_is,
)
from megasharp.convert.record import Digests, read_record, recorded_arguments, write_record
from megasharp.learner.checkpoint_stream import Cut, StreamedCheckpoint, cut, write_streamed
from megasharp.learner.meta_models import alone, blank_model
from megasharp.learner.model_check import check_model
from megasharp.learner.weights import LAYER

DTYPES = ("float32", "bfloat16", "float16")


def hf_to_megatron(source: Path, target: Path, *, tp: int = 1, pp: int = 1, dtype: str | None = None) -> None:
    """Convert a Hugging Face folder; `target` must not exist and appears only when complete.

    `tp` and `pp` only say where pieces of tensors begin and which file they are in: a load at that layout reads no byte
    that it does not need. `dtype` rounds the weights; without it they must have the one that config.json names.

    Raises:
        UserError: the source is damaged or not supported, the target exists, `tp` or `pp` does not divide the model,
            or the disk is full.
    """
    with HFReader(source) as reader:
        arch = reader.architecture
        arch.check_parallel(tp, pp, "--")
        written = as_dtype(arch.dtype if dtype is None else _asked(dtype))
        if dtype is None:
            _check_dtypes(reader)
        pieces = _cut(arch, source, written, tp)
        hashed = _HashingReader(reader, written)

        def value(name: str) -> Tensor:
            # Whole: the part of rank 0 of 1.
            return megatron_tensor(hashed, reader.family, arch, name, 0, 1)

        with completed_folder(target) as folder, folder_errors(target):
            (folder / "policy").mkdir()
            (folder / "hf").mkdir()
            carry_over(source, folder / "hf")
            set_dtype(folder / "hf" / CONFIG_FILE, dtype_name(written))
            write_streamed(folder / "policy", pieces, written, value, _stage_of(arch, pp))
            read = {reader.dtype(name) for name in reader.names()}
            write_record(folder, "hf-to-megatron", source, arch, hashed.digests, _names(read), dtype_name(written))
        _note_not_finite(hashed.digests, reader.file, target)


def megatron_to_hf(
    source: Path, target: Path, *, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Convert a Megatron folder or a run's checkpoint; `target` must not exist and appears only when complete.

    The weights keep the dtype they are stored in, or are rounded to `dtype`; config.json names it.

    Raises:
        UserError: the source is damaged, its config.json is not the one of its weights, or these have several dtypes
            and none is asked for; the target exists, or the disk is full.
    """
    if dtype is not None:
        _asked(dtype)
    weights = MegatronWeights(source)
    stored = weights.dtypes()
    if dtype is None and len(stored) > 1:
        found = " and ".join(f"{name} in {stored_in}" for stored_in, name in sorted(stored.items()))
        raise UserError(f"{source / 'policy'}: tensors {found}: have all of them rounded to one with --dtype")
    with completed_folder(target) as folder:
        fill_hf_folder(folder, target, source / "hf", weights.tensors(dtype), max_shard_bytes)
        with folder_errors(target):
            read = ", ".join(sorted(stored))
            write_record(folder, "megatron-to-hf", source, weights.architecture, weights.digests, read, dtype or read)
    _note_not_finite(weights.digests, lambda _: source / "policy", target)


def megatron_to_peft(source: Path, target: Path) -> None:
    """Write a run's adapters as a PEFT folder; `target` must not exist and appears only when complete.

    The folder names the run's base model, by its id and commit where the run had it of the hub. It must be a Hugging
    Face folder; otherwise a note says what to set.

    Raises:
        UserError: the source is damaged or has no adapters, the target exists, or the disk is full.
    """
    weights = MegatronWeights(source)
    if weights.lora is None:
        raise UserError(f"{source / 'policy'}: has no adapters, all weights were trained: use megatron-to-hf")
    base, key = recorded_base(source / "policy"), f"set base_model_name_or_path in {target / ADAPTER_CONFIG}"
    if base is None:
        note(f"{source} has no record of its base model: {key}")
    elif model_folder(Path(base)).is_megatron:
        note(f"the run's base model {base} is a Megatron folder: convert it (megatron-to-hf), then {key}")
        base = None
    model, commit = (base and hub_model(Path(base))) or (base, None)
    digests = Digests()
    with completed_folder(target) as folder, folder_errors(target):
        tensors = fill_peft_folder(folder, weights.lora, model, commit, weights.adapters())
        for name, tensor in tensors.items():
            digests.add(name, tensor, tensor.dtype)
        dtype = _names({tensor.dtype for tensor in tensors.values()})
        write_record(folder, "megatron-to-peft", source, weights.architecture, digests, dtype, dtype)


class MegatronWeights:
    """The weights of a Megatron folder or a run's checkpoint, as Hugging Face tensors, adapters merged into them.

    Opening checks the model's arguments and every stored tensor, and reads no weights; where no arguments are recorded,
    a note says so, unless it was `noted` before. `lora`: the settings of its adapters if it has any. `digests` fills as
    the tensors are read.

    Raises:
        UserError: the folder is not one, or is damaged.
    """

    def __init__(self, folder: Path, *, noted: bool = False) -> None:
        for part in ("policy", "hf"):
            if not (folder / part).is_dir():
                missing = f"not a Megatron checkpoint folder: {part}/ is missing"
                raise UserError(f"{folder}: {missing}{what_it_is(folder)}")
        self.folder = folder
        _, self.family, self.architecture = read_config(folder / "hf")
        arguments = recorded_arguments(folder)
        if arguments is None and not noted:
            config = folder / "hf" / CONFIG_FILE
            note(f"{folder} has no record of the model's arguments: {config} could not be checked against the weights")
        if arguments is not None:
            check_arguments(folder / "hf" / CONFIG_FILE, self.architecture, folder / "policy", arguments)
        self.lora = recorded_adapters(folder / "policy")
        self._pieces = _cut(self.architecture, folder / "hf", as_dtype(self.architecture.dtype), 1, self.lora)
        self._stored = StreamedCheckpoint(folder / "policy", self._pieces)
        self.digests = Digests()
        # Digests recorded by the conversion that wrote the folder; a run's checkpoint has no record.
        record = read_record(folder)
        self._expected: dict[str, str] = {} if record is None else {**record.tensors, **record.rounded}

    def dtypes(self) -> dict[str, str]:
        """Return the dtypes that weights are stored in, each with its first parameter; adapters do not count."""
        found: dict[str, str] = {}
        for parameter in self._pieces.pieces:
            if not is_adapter(parameter):
                found.setdefault(dtype_name(self._stored.dtype(parameter)), parameter)
        return found

    def tensors(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor once by its Hugging Face name, in the model's order, rounded to `dtype` if given.

        Raises:
            UserError: a file cannot be read, or a tensor is not what the conversion wrote.
        """
        for parameter in self._pieces.pieces:
            if is_adapter(parameter):
                continue
            value = self._value(parameter)
            for name, tensor in hf_tensors(self.family, self.architecture, parameter, [value]):
                written = tensor.dtype if dtype is None else as_dtype(dtype)
                self.digests.add(name, tensor, written)
                if self._expected.get(name, self.digests.read[name]) != self.digests.read[name]:
                    raise UserError(f"{self.folder / 'policy'}: tensor {name} is damaged: it is not what was converted")
                yield name, tensor.to(written)

    def adapters(self) -> Iterator[Projection]:
        """Yield every adapted projection (name, A, B), in the model's order; none where all weights were trained.

        Raises:
            UserError: a file cannot be read.
        """
        for parameter in self._pieces.pieces:
            if self.lora is None or target_of(parameter) not in self.lora.targets:
                continue
            rule, at = self.family.rule_for(self.architecture, parameter)
            a, b = self._adapter(parameter)
            # A fused projection is several of Hugging Face's: A has their rows in turn, B is cut as the weight is.
            parts = zip(rule.hf, a.chunk(len(rule.hf)), rule.merge([b], self.architecture), strict=True)
            yield from ((at.name(name), one_a, one_b) for name, one_a, one_b in parts)

    def _adapter(self, parameter: str) -> tuple[Tensor, Tensor]:
        module = parameter.removesuffix(".weight")
        a, b = (self._stored.parameter(f"{module}.{name}") for name in ADAPTER_NAMES)
        return a, b

    def _value(self, parameter: str) -> Tensor:
        value, target = self._stored.parameter(parameter), target_of(parameter)
        if self.lora is None or target is None or target not in self.lora.targets:
            return value
        return merged(value, *self._adapter(parameter), rows_of(target, self.architecture), self.lora.scale)


class _HashingReader:
    """Keeps the SHA-256 of every tensor that is read through it, as it is and as written in another dtype."""

    def __init__(self, reader: HFReader, written: torch.dtype) -> None:
        self._reader, self._written = reader, written
        self.digests = Digests()

    def tensor(self, name: str) -> Tensor:
        """Return the whole tensor, as the reader gives it."""
        tensor = self._reader.tensor(name)
        self.digests.add(name, tensor, self._written)
        return tensor


def _note_not_finite(digests: Digests, file: Callable[[str], Path], target: Path) -> None:
    """Print a note where values are not finite: a copy keeps them, but training refuses to start from them."""
    if digests.not_finite:
        first, *more = digests.not_finite
        tensors = f"tensor {first}" + (f" and {len(more)} more" if more else "")
        rounding = f", or too large for its dtype in {target}" if first in digests.rounded else ""
        note(f"{file(first)}: {tensors}: values that are NaN or infinite{rounding}; `megasharp train` refuses them")


def _check_dtypes(reader: HFReader) -> None:
    named = reader.architecture.dtype
    for name in reader.names():
        found = dtype_name(reader.dtype(name))
        if found != named:
            config = reader.folder / CONFIG_FILE
            raise UserError(
                f"{reader.file(name)}: tensor {name} has dtype {found}, but {config} names {named}: fix dtype there, "
                "or have all weights rounded with --dtype"
            )


def _cut(arch: Architecture, folder: Path, dtype: torch.dtype, tp: int, lora: LoraConfig | None = None) -> Cut:
    with alone() as place:
        model = blank_model(arch, place, dtype, lora)
        check_model(model, arch, folder / CONFIG_FILE)
        return cut(model, tp)


def _stage_of(arch: Architecture, pp: int) -> Callable[[str], int]:
    """Return the function from a parameter's name to its pipeline stage of `pp`."""

    def stage(name: str) -> int:
        layer = LAYER.match(name)
        if layer:
            return int(layer.group(1)) * pp // arch.num_layers
        return 0 if name.startswith("embedding.") else pp - 1

    return stage


def _asked(dtype: str) -> str:
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: choose from {', '.join(DTYPES)}")
    return dtype


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(map(dtype_name, dtypes)))
