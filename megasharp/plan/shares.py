"""How a network and a step are shared out: parameters of each pipeline stage, rows and micro-batches of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from megasharp.convert.lora import LoraSettings
from megasharp.plan.formulas import adapter_parameters, micro_batches
from megasharp.plan.request import Batch, Network, Split

# Packed rows come in steps of this many for each tensor-parallel rank.
_ROW_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers (global numbers) and parameters of a pipeline stage's rank, and how many of them are trained."""

    layers: tuple[int, ...]
    parameters: int
    trained: int


@lru_cache(maxsize=256)
def stages(network: Network, tp: int, pp: int, vpp: int, lora: LoraSettings | None = None) -> tuple[Stage, ...]:
    """Every stage, from the family's table; with vpp > 1 a stage holds every pp-th run of layers."""
    arch, family = network.architecture, network.family
    run = arch.num_layers // (pp * vpp)
    found = []
    for stage in range(pp):
        starts = [(chunk * pp + stage) * run for chunk in range(vpp)]
        layers = tuple(layer for start in starts for layer in range(start, start + run))
        shapes = family.parameter_shapes(arch, tp, layers=layers, first_stage=stage == 0, last_stage=stage == pp - 1)
        count = sum(math.prod(shape) for shape in shapes.values())
        adapters = len(layers) * adapter_parameters(arch, lora, tp) if lora else 0
        found.append(Stage(layers, count + adapters, adapters if lora else count))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows of a whole step; micro-batches of one rank in one optimizer step, and the rows of the largest."""

    step: int
    micro_batches: int
    largest: int


def rows_of(batch: Batch, split: Split) -> Rows:
    """A group's responses share one copy of the prompt in every micro-batch that has some of them."""
    lengths = batch.lengths
    room = max(lengths.response, split.micro_batch_tokens - lengths.prompt)
    copies = math.ceil(batch.responses * lengths.response / room)
    step = batch.prompts * (copies * lengths.prompt + batch.responses * lengths.response)
    multiple = split.pp if split.vpp > 1 else 1
    count = micro_batches(
        step / batch.mini_batches,
        batch.sequences / batch.mini_batches,
        budget=split.micro_batch_tokens,
        ranks=split.dp,
        multiple=multiple,
    )
    # A response that is longer than the budget is alone in its micro-batch.
    largest = max(min(split.micro_batch_tokens, step / (batch.mini_batches * split.dp)), lengths.longest)
    unit = _ROW_MULTIPLE * split.tp
    return Rows(math.ceil(step), count, math.ceil(largest / unit) * unit)
