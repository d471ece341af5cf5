"""`megasharp convert verify`: whether two folders, of Hugging Face or of Megatron, hold the same model.

First the arguments, then every tensor's name, shape, dtype and bytes, then what both models make of the same random
tokens: a Hugging Face folder by transformers, a Megatron folder by megasharp's model and Megatron's own loader. Equal
logits say that the mapping is right, which equal bytes alone do not. Weights of two dtypes are compared in the narrower
one; outputs that are no numbers in both models are left out, and counted.

Two models' outputs side by side, compared where both are numbers.

What each part of a model makes of given tokens, by transformers and by Megatron, for comparing the two.
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
from megasharp.common.records import ParallelLayout, Segments, as_dtype
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
    """How far two outputs of one part are apart where both are finite.

    `largest` is absolute, `relative` to the largest of A's values there; both are 0 where no value is finite in both.
    `compared` of `total` values are; `same_places` is whether those that are not finite in A are not in B, and the
    other way round.
    """

    largest: float
    relative: float
    compared: int
    total: int
    same_places: bool


def output_difference(mine: Tensor, theirs: Tensor) -> OutputDifference:
    """Of two float32 outputs of one shape, which is any."""
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
# Output of each part by its name, in the order in which they run: float32 [P, hidden], and [P, vocab] of the logits,
# P being all tokens of all sequences.
LayerOutputs = dict[str, Tensor]


def layer_name(number: int) -> str:
    """What the decoder layer `number` (from 0, as in the weights' names) is called."""
    return f"layer {number}"


class _Tap:
    """Keeps the outputs of modules on the CPU, in float32 and in the order in which they ran."""

    def __init__(self) -> None:
        self.outputs: LayerOutputs = {}

    def on(self, module: torch.nn.Module, name: str) -> None:
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
    """By transformers' own model of a Hugging Face folder, one sequence at a time; `rounded` rounds its weights first.

    Raises:
        UserError: transformers cannot load the folder.
    """
    disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
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
    """By megasharp's model, filled by Megatron's own loader from the torch_dist folder `weights`.

    The sequences are packed into one row, as in training; adapters stay beside the frozen weights. `rounded` rounds all
    of them first.

    Raises:
        UserError: Megatron cannot load the folder.
    """
    with alone() as place:
        config = transformer_config(arch, ParallelLayout(), dtype, "none", {})
        config.use_cpu_initialization = True
        (model,) = build_chunks(config, arch, place, recorded_adapters(weights))
        try:
            load_model(weights, [model])
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
        tokens_P, positions_P = torch.cat(list(sequences)), _positions(sequences)
        cos, sin = rotary_tables(*rotary_frequencies(arch), positions_P)
        rows = packed_rows(_runs(sequences), cos, sin)
        model.eval()(tokens_P[None], positions_P[None], None, packed_seq_params=rows)
    return tap.outputs


def _round(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def _positions(sequences: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.arange(tokens.numel()) for tokens in sequences])


def _runs(sequences: Sequence[Tensor]) -> Segments:
    length = torch.tensor([tokens.numel() for tokens in sequences])
    return Segments(start=length.cumsum(0) - length, length=length, prefix=torch.full_like(length, -1))


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
    """What was found, as lines to print.

    "rounded": the folders hold one model in two dtypes, one's weights are the other's rounded.
    """

    outcome: Outcome
    lines: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether both are the same model, bit for bit."""
        return self.outcome == "equal"

    @property
    def exit_code(self) -> int:
        """What the command ends with."""
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
        """What it is, on a line."""
        adapted = ", adapters merged" if self.adapters else ""
        return f"{self.folder} ({self.kind}, {' and '.join(sorted(self.dtypes()))}{adapted})"

    def dtypes(self) -> set[str]:
        """What its tensors are stored in."""
        return {tensor.dtype for tensor in self.tensors.values()}

    def outputs(self, sequences: Sequence[Tensor], dtype: torch.dtype, rounded: torch.dtype | None) -> LayerOutputs:
        """What its model makes of the sequences, with its weights rounded first where that is asked for."""
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
    arguments = _compare_arguments(*sides)
    tensors = Comparison(sides[0].tensors, sides[1].tensors, _alike_after_rounding(*sides))
    outputs = _outputs(sides, tensors, probe)
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
    return {
        name: Described(tuple(t.shape), str(t.dtype).removeprefix("torch."), tensor_sha256(t), is_finite(t))
        for name, t in read()
    }


def _compare_arguments(one: _Side, other: _Side) -> list[str]:
    found = differences(model_arguments(one.architecture), model_arguments(other.architecture))
    return [f"argument {key}: {mine} in A, {theirs} in B" for key, mine, theirs in found]


def _alike_after_rounding(one: _Side, other: _Side) -> dict[str, str]:
    """The tensors that only their dtypes tell apart, with the dtype that one side's were rounded to."""
    found: dict[str, str] = {}
    for wide, narrow in ((one, other), (other, one)):
        wanted = to_round(wide.tensors, narrow.tensors)
        for name, tensor in wide.read() if wanted else ():
            dtype = wanted.get(name)
            if dtype is not None and tensor_sha256(tensor.to(as_dtype(dtype))) == narrow.tensors[name].sha256:
                found.setdefault(name, dtype)
    return found


def _outputs(sides: tuple[_Side, _Side], tensors: Comparison, probe: Probe | None) -> Verification:
    if probe is None:
        return Verification("equal", ("logits: not compared",))
    if not tensors.same_shapes():
        return Verification("equal", ("logits: not compared, the models have other shapes",))
    return _compare_outputs(sides, tensors, probe)


def _compare_outputs(sides: tuple[_Side, _Side], tensors: Comparison, probe: Probe) -> Verification:
    """The parts in the order in which they run: the first that differs, and the logits."""
    sequences, rounded = _sequences(sides[0].architecture.vocab, probe), set(tensors.rounded.values())
    weights = as_dtype(next(iter(rounded))) if len(rounded) == 1 else None
    # One model is let go before the other is loaded.
    mine, theirs = (side.outputs(sequences, as_dtype(probe.dtype), weights) for side in sides)
    tolerance = _tolerance(sides, probe)
    found = {name: output_difference(mine[name], theirs[name]) for name in mine}
    # What a NaN or an infinity reaches depends on the kernels: one attends to masked tokens with a weight of 0, which
    # makes NaN of NaN, the other never sees them.
    any_place = tensors.share_values_that_are_no_numbers()
    first = next((name for name, it in found.items() if not _passes(it, tolerance, any_place)), None)
    tokens = ", ".join(str(sequence.numel()) for sequence in sequences)
    heading = f"logits of random sequences of {tokens} tokens in {probe.dtype}"
    lines = [f"{heading}: {_logits_found(found[LOGITS], tolerance)}"]
    if first is not None:
        lines.append(f"first difference by layer: {first}, {_what(found[first], any_place)}")
    return Verification("equal" if first is None else "different", tuple(lines))


def _passes(found: OutputDifference, tolerance: float, any_place: bool) -> bool:
    return found.relative <= tolerance and (found.same_places or any_place)


def _logits_found(found: OutputDifference, tolerance: float) -> str:
    if not found.compared:
        return "not compared, none is finite in both models"
    numbers = (
        f"largest difference {found.largest:.3g}, {found.relative:.3g} of the largest logit (tolerance {tolerance:g})"
    )
    left_out = found.total - found.compared
    if not left_out:
        return numbers
    return f"{numbers}; {left_out} of {found.total} are NaN or infinite and were not compared"


def _what(found: OutputDifference, any_place: bool) -> str:
    if not found.same_places and not any_place:
        return "NaN or infinite values in one model where the other has numbers"
    return f"{found.relative:.3g} of its largest value"


def _tolerance(sides: tuple[_Side, _Side], probe: Probe) -> float:
    """Of the computation's dtype; merged adapters were rounded to the weights' dtype, those beside them were not."""
    dtypes = {probe.dtype}
    if any(side.adapters for side in sides):
        dtypes |= sides[0].dtypes() | sides[1].dtypes()
    return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)


def _sequences(vocab: int, probe: Probe) -> list[Tensor]:
    """Two, of different lengths, so that a packed row has more than one run."""
    generator = torch.Generator().manual_seed(probe.seed)
    lengths = (probe.tokens, probe.tokens // 2)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]
