"""How a network and a step are shared out: parameters of each pipeline stage, rows and micro-batches of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from megasharp.batching.layout import row_multiple
from megasharp.convert.lora import LoraSettings
from megasharp.plan.formulas import adapter_parameters, micro_batches
from megasharp.plan.request import Batch, Network, Split
from megasharp.types import ParallelLayout


def runs_of_layers(count: int, layout: ParallelLayout, stage: int) -> tuple[range, ...]:
    """Which of a model's `count` layers (from 0) a pipeline stage has: with vpp > 1 every pp-th of shorter runs."""
    length = count // (layout.pp * layout.vpp)
    starts = [(chunk * layout.pp + stage) * length for chunk in range(layout.vpp)]
    return tuple(range(start, start + length) for start in starts)


def run_text(run: range) -> str:
    """The numbers of a run of layers: "8-15", or "8" alone."""
    return f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])


@dataclass(frozen=True, slots=True)
class Stage:
    """Runs of layers and parameters of a pipeline stage's rank, and how many of them are trained."""

    runs: tuple[range, ...]
    parameters: int
    trained: int

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return sum(map(len, self.runs))


@lru_cache(maxsize=256)
def stages(network: Network, layout: ParallelLayout, lora: LoraSettings | None = None) -> tuple[Stage, ...]:
    """Every stage, from the family's table."""
    arch, family, last = network.architecture, network.family, layout.pp - 1
    found = []
    for stage in range(layout.pp):
        runs = runs_of_layers(arch.num_layers, layout, stage)
        layers = tuple(chain.from_iterable(runs))
        shapes = family.parameter_shapes(
            arch, layout.tp, layers=layers, first_stage=stage == 0, last_stage=stage == last
        )
        count = sum(math.prod(shape) for shape in shapes.values())
        adapters = len(layers) * adapter_parameters(arch, lora, layout.tp) if lora else 0
        found.append(Stage(runs, count + adapters, adapters if lora else count))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows of a whole step; micro-batches of one rank in one optimizer step, and the rows of the largest."""

    step: int
    micro_batches: int
    largest: int


def rows_of(batch: Batch, split: Split, device: str) -> Rows:
    """A group's responses share one copy of the prompt in every micro-batch that has some of them.

    `device` is the type ("cpu", "cuda"): packed rows are padded less on a GPU.
    """
    lengths = batch.lengths
    room = max(lengths.response, split.micro_batch_tokens - lengths.prompt)
    copies = math.ceil(batch.responses * lengths.response / room)
    step = batch.prompts * (copies * lengths.prompt + batch.responses * lengths.response)
    count = micro_batches(
        step / batch.mini_batches,
        batch.sequences / batch.mini_batches,
        budget=split.micro_batch_tokens,
        ranks=split.dp,
        multiple=split.micro_batch_multiple,
    )
    # A response that is longer than the budget is alone in its micro-batch.
    largest = max(min(split.micro_batch_tokens, step / (batch.mini_batches * split.dp)), lengths.longest)
    unit = row_multiple(split.layout, device)
    return Rows(math.ceil(step), count, math.ceil(largest / unit) * unit)
