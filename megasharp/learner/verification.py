"""Compare two folders, of Hugging Face or of Megatron, for `megasharp convert verify`: do they hold the same model?

First the arguments, then every tensor's name, shape, dtype and bytes, then the outputs of both models on the same
random tokens, part by part: a Hugging Face folder by transformers, a Megatron folder by megasharp's model and
Megatron's own loader. Equal logits say that the mapping is right, which equal bytes alone do not. Weights of two dtypes
are compared in the narrower one; outputs that are not finite in either model are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from megasharp.common.errors import UserError, one_line
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import Segments, as_dtype, dtype_name
from megasharp.config.policy import PolicyConfig
from megasharp.convert.architecture import Architecture, differences, model_arguments
from megasharp.convert.compare_tensors import Comparison, Described, to_round
from megasharp.convert.hf_folder import HFReader
from megasharp.convert.lora import recorded_adapters
from megasharp.convert.model_folder import CONFIG_FILE, what_it_is
from megasharp.convert.record import is_finite, tensor_sha256
from megasharp.convert.rope import rotary_frequencies
from megasharp.learner.attention import rotary_tables
from megasharp.learner.conversion import DTYPES, MegatronWeights
from megasharp.learner.meta_models import alone
from megasharp.learner.model import build_chunks, transformer_config
from megasharp.learner.packed import packed_rows
from megasharp.learner.sharded_state import load_model


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """The difference of two outputs of one part, where both are finite.

    `largest` is absolute, `relative` to the largest of A's values there; both are 0 where no value is finite in both.
    `compared` of `total` values are; `same_places` is True where the same values are not finite in A and in B.
    """

    largest: float
    relative: float
    compared: int
    total: int
    same_places: bool


def output_difference(mine: Tensor, theirs: Tensor) -> OutputDifference:
    """Compare two float32 outputs of one shape, which is any."""
    is_mine, is_theirs = mine.isfinite(), theirs.isfinite()
    both = is_mine & is_theirs
    a, b = mine.where(both, 0), theirs.where(both, 0)
    largest = (a - b).abs().max()
    return OutputDifference(
        largest=float(largest),
        relative=float(largest / a.abs().max().clamp(min=torch.finfo(torch.float32).tiny)),
        compared=int(both.sum()),
        total=both.numel(),
        same_places=bool(torch.equal(is_mine, is_theirs)),
    )


EMBEDDING, FINAL_NORM, LOGITS = "embedding", "final norm", "logits"
# Output of each part by its name, in the order in which they run: float32 [P, hidden], and [P, vocab] of the logits.
# P is the number of tokens of all sequences.
LayerOutputs = dict[str, Tensor]


def layer_name(number: int) -> str:
    """Return the name of the decoder layer `number` (from 0, as in the weights' names)."""
    return f"layer {number}"


class _Tap:
    """Keeps the outputs of modules on the CPU, in float32 and in the order in which they ran."""

    def __init__(self) -> None:
        self.outputs: LayerOutputs = {}

    def on(self, module: torch.nn.Module, name: str) -> None:
        """Keep what `module` returns from now on as `name`; repeated calls are joined by rows, [rows, features]."""

        def keep(_: torch.nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
            whole = output if isinstance(output, Tensor) else output[0]
            rows = whole.detach().float().cpu().reshape(-1, whole.shape[-1])
            before = self.outputs.get(name)
            self.outputs[name] = rows if before is None else torch.cat([before, rows])

        module.register_forward_hook(keep)


@torch.no_grad()
def transformers_outputs(
    folder: Path, sequences: Sequence[Tensor], dtype: torch.dtype, rounded: torch.dtype | None = None
) -> LayerOutputs:
    """Compute the outputs of transformers' own model of a Hugging Face folder, one sequence at a time.

    `sequences`: int64 token ids; `dtype` of the computation; `rounded` rounds the weights first.

    Raises:
        UserError: transformers cannot load the folder.
    """
    disable_progress_bar()
    try:
        # Weights of a pickled file beside them, and a program of the folder's own, are not read.
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    # transformers reports a folder it cannot load with whatever the cause happened to raise.
    except Exception as error:
        raise UserError(f"{folder}: transformers cannot load this folder: {one_line(error)}") from error
    _round(model, rounded)
    tap = _Tap()
    tap.on(model.model.embed_tokens, EMBEDDING)
    for number, layer in enumerate(model.model.layers):
        tap.on(layer, layer_name(number))
    tap.on(model.model.norm, FINAL_NORM)
    tap.on(model.lm_head, LOGITS)
    for tokens in sequences:
        model.eval()(tokens[None], use_cache=False)
    return tap.outputs


@torch.no_grad()
def megatron_outputs(
    weights: Path,
    arch: Architecture,
    sequences: Sequence[Tensor],
    dtype: torch.dtype,
    rounded: torch.dtype | None = None,
) -> LayerOutputs:
    """Compute the outputs of megasharp's model, filled by Megatron's own loader from the torch_dist folder `weights`.

    The sequences are packed, as in training; adapters stay beside the frozen weights. All else as in
    `transformers_outputs`.

    Raises:
        UserError: Megatron cannot load the folder.
    """
    with alone() as place:
        config = transformer_config(arch, ParallelLayout(), dtype, PolicyConfig(), {})
        config.use_cpu_initialization = True
        (model,) = build_chunks(config, arch, place, recorded_adapters(weights))
        try:
            load_model(weights, [model])
        except UserError:
            raise
        # Megatron raises many kinds for damaged shards.
        except Exception as error:
            raise UserError(f"{weights}: Megatron cannot load this folder: {one_line(error)}") from error
        _round(model, rounded)
        tap = _Tap()
        tap.on(model.embedding, EMBEDDING)
        for number, layer in enumerate(model.decoder.layers):
            tap.on(layer, layer_name(number))
        tap.on(model.decoder.final_layernorm, FINAL_NORM)
        tap.on(model.output_layer, LOGITS)
        tokens_P = torch.cat(list(sequences))
        positions_P = torch.cat([torch.arange(tokens.numel()) for tokens in sequences])
        cos, sin = rotary_tables(*rotary_frequencies(arch), positions_P)
        length = torch.tensor([tokens.numel() for tokens in sequences])
        runs = Segments(start=length.cumsum(0) - length, length=length, prefix=torch.full_like(length, -1))
        rows = packed_rows(runs, cos, sin)
        model.eval()(tokens_P[None], positions_P[None], None, packed_seq_params=rows)
    return tap.outputs


def _round(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


# Largest difference of an output, relative to the largest value of that output. Both sides hold the same weights; what
# is left is the order of their sums, and in the shorter dtypes the roundings between operations, which add up over
# layers. Measured on the quickstart's base (4 layers): 6e-7, 1.2e-2 and 1.5e-3.
TOLERANCES = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 8e-3}

Outcome = Literal["equal", "rounded", "different"]
# 2 is a user's mistake, as in every command.
EXIT_CODES: dict[Outcome, int] = {"equal": 0, "different": 1, "rounded": 3}


@dataclass(frozen=True, slots=True)
class Probe:
    """Random tokens for the logits: the longest sequence's length, the seed, and the dtype of the computation."""

    tokens: int = 64
    seed: int = 0
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Verification:
    """The result, as lines to print.

    "rounded": the folders hold one model in two dtypes, one's weights are the other's rounded.
    """

    outcome: Outcome
    lines: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Return whether both are the same model, bit by bit."""
        return self.outcome == "equal"

    @property
    def exit_code(self) -> int:
        """Return the command's exit code."""
        return EXIT_CODES[self.outcome]


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two folders; `read` gives all tensors, one after the other."""

    folder: Path
    kind: Literal["Hugging Face", "Megatron"]
    architecture: Architecture
    adapters: bool
    read: Callable[[], Iterator[tuple[str, Tensor]]]
    tensors: Mapping[str, Described]

    def heading(self) -> str:
        """Describe the folder on a line."""
        adapted = ", adapters merged" if self.adapters else ""
        return f"{self.folder} ({self.kind}, {' and '.join(sorted(self.dtypes()))}{adapted})"

    def dtypes(self) -> set[str]:
        """Return the names of its tensors' dtypes."""
        return {tensor.dtype for tensor in self.tensors.values()}

    def outputs(self, sequences: Sequence[Tensor], dtype: torch.dtype, rounded: torch.dtype | None) -> LayerOutputs:
        """Compute its model's outputs, with the weights rounded first if asked."""
        if self.kind == "Megatron":
            return megatron_outputs(self.folder / "policy", self.architecture, sequences, dtype, rounded)
        return transformers_outputs(self.folder, sequences, dtype, rounded)


def verify(one: Path, other: Path, probe: Probe | None) -> Verification:
    """Compare two folders; without `probe` no logits are computed, and no model is held in memory.

    Raises:
        UserError: a folder is damaged or not supported, or the probe asks for what is not offered.
    """
    if probe is not None and (probe.dtype not in DTYPES or probe.tokens < 2):
        raise UserError(f"--dtype {probe.dtype} --tokens {probe.tokens}: expected one of {', '.join(DTYPES)}, and 2 up")
    sides = _side(one), _side(other)
    unequal = differences(*(model_arguments(side.architecture) for side in sides))
    arguments = [f"argument {key}: {mine} in A, {theirs} in B" for key, mine, theirs in unequal]
    tensors = Comparison(sides[0].tensors, sides[1].tensors, _alike_after_rounding(*sides))
    if probe is None:
        outputs = Verification("equal", ("logits: not compared",))
    elif not tensors.same_shapes():
        outputs = Verification("equal", ("logits: not compared, the models have other shapes",))
    else:
        outputs = _compare_outputs(sides, tensors, probe)
    different = bool(arguments or tensors.different()) or not outputs.equal
    outcome: Outcome = "different" if different else "rounded" if tensors.rounded else "equal"
    last = f"equal after rounding to {tensors.rounded_to()}" if outcome == "rounded" else outcome
    headings = (f"{letter}: {side.heading()}" for letter, side in zip("AB", sides, strict=True))
    found = arguments or ["arguments: equal"]
    return Verification(outcome, (*headings, *found, *tensors.lines(), *outputs.lines, last))


def _side(folder: Path) -> _Side:
    if (folder / CONFIG_FILE).is_file():
        with HFReader(folder) as reader:
            arch = reader.architecture
        read = partial(_hf_tensors, folder)
        return _Side(folder, "Hugging Face", arch, False, read, _described(read))
    if (folder / "policy").is_dir():
        weights = MegatronWeights(folder)
        adapters = weights.lora is not None
        described = _described(weights.tensors)
        return _Side(folder, "Megatron", weights.architecture, adapters, weights.tensors, described)
    raise UserError(f"{folder}: neither a Hugging Face folder nor a Megatron checkpoint folder{what_it_is(folder)}")


def _hf_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    with HFReader(folder) as reader:
        for name in reader.names():
            yield name, reader.tensor(name)


def _described(read: Callable[[], Iterator[tuple[str, Tensor]]]) -> dict[str, Described]:
    return {name: Described(tuple(t.shape), dtype_name(t.dtype), tensor_sha256(t), is_finite(t)) for name, t in read()}


def _alike_after_rounding(one: _Side, other: _Side) -> dict[str, str]:
    """Find the tensors that differ by their dtypes alone, with the dtype that one side's were rounded to."""
    found: dict[str, str] = {}
    for wide, narrow in ((one, other), (other, one)):
        wanted = to_round(wide.tensors, narrow.tensors)
        for name, tensor in wide.read() if wanted else ():
            dtype = wanted.get(name)
            if dtype is not None and tensor_sha256(tensor.to(as_dtype(dtype))) == narrow.tensors[name].sha256:
                found.setdefault(name, dtype)
    return found


def _compare_outputs(sides: tuple[_Side, _Side], tensors: Comparison, probe: Probe) -> Verification:
    """Compare the parts in the order in which they run: report the first that differs, and the logits."""
    generator = torch.Generator().manual_seed(probe.seed)
    # Two sequences, of different lengths, so that the packed rows have more than one run.
    lengths, vocab = (probe.tokens, probe.tokens // 2), sides[0].architecture.vocab
    sequences = [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]
    rounded = set(tensors.rounded.values())
    weights = as_dtype(next(iter(rounded))) if len(rounded) == 1 else None
    # One model is freed before the other is loaded.
    mine, theirs = (side.outputs(sequences, as_dtype(probe.dtype), weights) for side in sides)
    dtypes = {probe.dtype}
    if any(side.adapters for side in sides):
        # Merged adapters were rounded to the weights' dtype, those beside the weights were not.
        dtypes |= sides[0].dtypes() | sides[1].dtypes()
    tolerance = max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)
    found = {name: output_difference(mine[name], theirs[name]) for name in mine}
    # How far a NaN or an infinity spreads depends on the kernels: one attends to masked tokens with weight 0, which
    # makes NaN of NaN, the other never sees them.
    any_place = tensors.share_values_that_are_no_numbers()
    failed = (name for name, it in found.items() if it.relative > tolerance or not (it.same_places or any_place))
    first = next(failed, None)
    tokens = ", ".join(map(str, lengths))
    lines = [f"logits of random sequences of {tokens} tokens in {probe.dtype}: {_describe(found[LOGITS], tolerance)}"]
    if first is not None:
        fault = f"{found[first].relative:.3g} of its largest value"
        if not found[first].same_places and not any_place:
            fault = "NaN or infinite values in one model where the other has numbers"
        lines.append(f"first difference by layer: {first}, {fault}")
    return Verification("equal" if first is None else "different", tuple(lines))


def _describe(found: OutputDifference, tolerance: float) -> str:
    if not found.compared:
        return "not compared, none is finite in both models"
    numbers = (
        f"largest difference {found.largest:.3g}, {found.relative:.3g} of the largest logit (tolerance {tolerance:g})"
    )
    left_out = found.total - found.compared
    if not left_out:
        return numbers
    return f"{numbers}; {left_out} of {found.total} are NaN or infinite and were not compared"
