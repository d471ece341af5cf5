"""What each part of a model makes of given tokens, by transformers and by Megatron, for comparing the two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from megasharp.convert.architecture import Architecture
from megasharp.convert.lora import recorded_adapters
from megasharp.convert.rope import rotary_frequencies
from megasharp.errors import UserError, one_line
from megasharp.mcore.blank import alone
from megasharp.mcore.model import build_chunks, transformer_config
from megasharp.mcore.packed import packed_rows
from megasharp.mcore.rope import rotary_tables
from megasharp.mcore.state import load_model
from megasharp.types import ParallelLayout, Segments

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
