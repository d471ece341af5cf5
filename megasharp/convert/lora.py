"""Low-rank adapters (LoRA, arXiv 2106.09685) on Megatron's fused linear maps: their layout and how they are merged.

There is one adapter per Hugging Face projection, as PEFT has it: query, key and value have an A and a B each, and so
have gate and up. Every row of a fused weight belongs to one projection, so B is laid out row by row as the weight is
and is cut and joined by the weight's own rule; only A holds the projections' parts on top of each other. One A for the
whole fused map would train another model than PEFT does at the same rank; this one is PEFT's, written as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from megasharp.common.errors import UserError, reason_at
from megasharp.common.files import write_text
from megasharp.common.section import Section
from megasharp.config.core import validate
from megasharp.config.policy import LoraConfig, LoraTarget
from megasharp.convert.architecture import Architecture

TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)

# The module of each target in a Megatron layer.
MODULES: dict[LoraTarget, str] = {
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
# Names of an adapter's two parameters, beside the `weight` of their module.
ADAPTER_NAMES = ("lora_A", "lora_B")
RECORD = "lora.json"


@dataclass(frozen=True, slots=True)
class Rows:
    """The projections' rows in one rank's fused weight: `groups` runs, in each `sizes[p]` rows of projection p.

    Example: 2 query groups of 4 heads of 8, one key and one value head each: `Rows(2, (32, 8, 8))`.
    """

    groups: int
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """All rows of the weight."""
        return self.groups * sum(self.sizes)

    def split(self, rows: Tensor) -> list[Tensor]:
        """Split [total, ...] into each projection's [groups * size, ...], in its own order."""
        grouped = rows.reshape(self.groups, sum(self.sizes), *rows.shape[1:])
        return [block.flatten(0, 1) for block in grouped.split_with_sizes(list(self.sizes), dim=1)]

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """Join each projection's [..., groups * size] to [..., total], in the weight's order."""
        if len(outputs) == 1:
            return outputs[0]
        grouped = [output.reshape(*output.shape[:-1], self.groups, -1) for output in outputs]
        return torch.cat(grouped, dim=-1).flatten(-2)


def is_adapter(name: str) -> bool:
    """Return True for the name of an adapter's Megatron parameter."""
    return name.rsplit(".", 1)[-1] in ADAPTER_NAMES


def target_of(name: str) -> LoraTarget | None:
    """Return the target that the weight `name` would be, or None for all other parameters."""
    return next((target for target, module in MODULES.items() if name.endswith(f".{module}.weight")), None)


def rows_of(target: LoraTarget, arch: Architecture, tp: int = 1) -> Rows:
    """Return the rows of one of `tp` ranks' weight; proj and fc2 are cut by columns, so each rank has all rows."""
    if target == "qkv":
        query = arch.heads // arch.kv_heads * arch.head_dim
        return Rows(arch.kv_heads // tp, (query, arch.head_dim, arch.head_dim))
    if target == "fc1":
        return Rows(1, (arch.ffn // tp, arch.ffn // tp))
    return Rows(1, (arch.hidden,))


def input_size(target: LoraTarget, arch: Architecture) -> int:
    """Return the number of columns of the whole weight."""
    return {"qkv": arch.hidden, "proj": arch.query_size, "fc1": arch.hidden, "fc2": arch.ffn}[target]


def trained_parameters(lora: LoraConfig, arch: Architecture) -> int:
    """Count the parameters of the whole model's adapters: all that is trained."""
    per_layer = 0
    for target in lora.targets:
        rows = rows_of(target, arch)
        per_layer += lora.rank * (len(rows.sizes) * input_size(target, arch) + rows.total)
    return arch.num_layers * per_layer


def raised(low: Tensor, b: Tensor, rows: Rows) -> Tensor:
    """Multiply low-rank values by B: [..., projections * rank] and [total, rank] -> [..., total]."""
    lows = low.chunk(len(rows.sizes), dim=-1)
    return rows.join([F.linear(one, block) for one, block in zip(lows, rows.split(b), strict=True)])


def merged(weight: Tensor, a: Tensor, b: Tensor, rows: Rows, scale: float) -> Tensor:
    """Merge an adapter: weight + scale B A, rounded once to the weight's dtype.

    [total, inputs], [projections * rank, inputs] and [total, rank] -> [total, inputs]: whole tensors, or one rank's
    parts of all three.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    change = raised(a.to(dtype).T, b.to(dtype), rows).T
    return torch.add(weight.to(dtype), change, alpha=scale).to(weight.dtype).contiguous()


class _Record(Section):
    rank: int
    alpha: float
    targets: list[LoraTarget]
    base: str | None = None


def record_adapters(folder: Path, lora: LoraConfig, base: Path) -> None:
    """Record in a folder of shards which adapters they hold, on the weights of which Hugging Face folder `base`.

    Without it they could not be merged.
    """
    record = {**lora.model_dump(), "base": str(base.absolute())}
    write_text(folder / RECORD, json.dumps(record, indent=1) + "\n")


def recorded_adapters(folder: Path) -> LoraConfig | None:
    """Read the settings that `record_adapters` wrote, or None where the folder's weights have no adapters.

    Raises UserError when the record cannot be read.
    """
    record = _read(folder)
    return None if record is None else LoraConfig(rank=record.rank, alpha=record.alpha, targets=record.targets)


def recorded_base(folder: Path) -> str | None:
    """Read the folder of the model that the adapters began with; None where that was not recorded.

    Raises UserError when the record cannot be read.
    """
    record = _read(folder)
    return None if record is None else record.base


def _read(folder: Path) -> _Record | None:
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a record of adapters: {reason_at(error, path)}") from error
    return validate(_Record, tree, str(path))
