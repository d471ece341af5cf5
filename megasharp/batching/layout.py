"""How a step is cut: ranks, token budget, and what the packed length must divide by."""

from __future__ import annotations

from dataclasses import dataclass

from megasharp.batching.flops import ROWS_ALONE, Flops
from megasharp.types import ParallelLayout

# On a CPU packed rows come in steps of this many for each tensor-parallel rank: oneDNN keeps code and scratch memory
# for every matrix shape, and so there are few. Measured: with free lengths resident memory grew by 20 MB a step, with
# this by none after the first steps.
CPU_ROWS = 128
# On a GPU nothing is kept per shape. Tensor cores want multiples of 8 rows in bfloat16, and Transformer Engine refuses
# others than multiples of 16 in FP8 (of 8 in one of the two products), on each rank.
GPU_ROWS = 16


@dataclass(frozen=True, slots=True)
class PackLayout:
    """How a step is cut. Token counts include prompts; `row_multiple` is what the packed length must divide by.

    A rank's number of micro-batches is a multiple of `micro_batch_multiple`, which interleaved pipelines ask for.
    `constant` is the horizon of `token_sum_over_constant`; `share_prompts` keeps one copy of a group's prompt. `flops`
    says what rows cost, by which ranks are balanced.
    """

    dp: int
    micro_batch_tokens: int
    mini_batches: int
    row_multiple: int
    constant: float
    share_prompts: bool = True
    micro_batch_multiple: int = 1
    flops: Flops = ROWS_ALONE


def row_multiple(layout: ParallelLayout, device: str) -> int:
    """What the packed length must divide by on a device of this type ("cpu", "cuda").

    Sequence parallelism cuts the rows over `tp` ranks, context parallelism into 2 * cp pieces before that (zigzag), and
    what a rank multiplies must itself be a multiple of `CPU_ROWS` or `GPU_ROWS`, both even.
    """
    return (CPU_ROWS if device == "cpu" else GPU_ROWS) * layout.tp * layout.cp
