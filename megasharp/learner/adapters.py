"""Linear maps with low-rank adapters (LoRA, arXiv 2106.09685, section 4.1).

The layer spec names the classes of this file for the adapted maps; `attach` then freezes the whole model and gives each
of them an A and a B (their layout: `convert/lora.py`). Megatron's reduction and its distributed optimizer take only
parameters that require a gradient, so frozen weights have neither a gradient buffer nor moments.

Under tensor parallelism ranks exchange the low-rank values. A column-parallel map multiplies each rank's part of the
sequence by the whole A and gathers the results; a row-parallel one sums the ranks' products with their columns of A and
scatters the sum over the sequence. Either way one of the two, A or B, is the same on every rank and has seen only a
part of the sequence: it carries the mark by which Megatron sums its gradient over the ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megasharp.config.policy import LoraConfig, LoraTarget
from megasharp.convert.architecture import Architecture
from megasharp.convert.lora import ADAPTER_NAMES, MODULES, Rows, input_size, merged, raised, rows_of
from megasharp.learner.parallel import Place


class _Adapted(torch.nn.Module):
    """A linear map with a frozen weight, A [projections * rank, inputs] and B [outputs, rank]."""

    weight: torch.nn.Parameter
    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter
    target: LoraTarget
    rows: Rows
    scale: float
    # The dimension in which A and B are split over tensor-parallel ranks; None where they are the same on all.
    split: tuple[int | None, int | None]

    def adapt(self, target: LoraTarget, lora: LoraConfig, rows: Rows, a: Tensor) -> None:
        """Take this rank's part of A's initial values. B starts at zero, so that the model starts unchanged."""
        self.target, self.rows, self.scale = target, rows, lora.scale
        self.lora_A = torch.nn.Parameter(a.to(self.weight))
        self.lora_B = torch.nn.Parameter(self.weight.new_zeros(rows.total, lora.rank))
        for parameter, dimension in zip((self.lora_A, self.lora_B), self.split, strict=True):
            if dimension is None:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            else:
                set_tensor_model_parallel_attributes(parameter, True, dimension, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's entries, with A or B split as the weight is; gate and up are split each by itself."""
        assert metadata is not None
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        dimensions = {name: at for name, at in zip(ADAPTER_NAMES, self.split, strict=True) if at is not None}
        entries = make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in dimensions},
            prefix,
            dimensions,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.target == "fc1":
            entries = {key: apply_swiglu_sharded_factory(entry, sharded_offsets) for key, entry in entries.items()}
        return {**state, **entries}

    def merged_weight(self) -> Tensor:
        """Return this rank's part of weight + scale B A, in the weight's dtype; the weight itself is unchanged.

        Its shape is the weight's, [outputs, inputs] of this rank.
        """
        return merged(self.weight.detach(), self.lora_A.detach(), self.lora_B.detach(), self.rows, self.scale)


class AdaptedColumns(_Adapted, ColumnParallelLinear):  # type: ignore[misc]
    """The fused query-key-value map, or gate and up: outputs are split over ranks, and so are the rows of B."""

    split = (None, 0)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute Megatron's output plus scale B A x, and the bias: [..., inputs] to [..., this rank's outputs].

        With sequence parallelism the first dimension is a part of the sequence in `input_` and whole in the output.
        """
        output, bias = super().forward(input_, *args, **kwargs)
        low = F.linear(input_, self.lora_A)
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        return output + self.scale * raised(low, self.lora_B, self.rows), bias


class AdaptedRows(_Adapted, RowParallelLinear):  # type: ignore[misc]
    """The output projection, or down: inputs are split over ranks, and so are the columns of A."""

    split = (1, None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute Megatron's output plus scale B A x, and the bias: [..., this rank's inputs] to [..., outputs].

        With sequence parallelism the first dimension is a part of the sequence in the output and whole in `input_`.
        """
        output, bias = super().forward(input_)
        low = F.linear(input_, self.lora_A)
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        return output + self.scale * F.linear(low, self.lora_B), bias


# Linear layers that replace Megatron's in the layer spec.
ADAPTED: dict[LoraTarget, type[_Adapted]] = {
    "qkv": AdaptedColumns,
    "proj": AdaptedRows,
    "fc1": AdaptedColumns,
    "fc2": AdaptedRows,
}


def attach(model: GPTModel, lora: LoraConfig, arch: Architecture, place: Place, seed: int) -> None:
    """Freeze every weight and give the adapted maps their A and B, with initial values that no layout changes."""
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        for target in lora.targets:
            module = layer.get_submodule(MODULES[target])
            assert isinstance(module, _Adapted)
            tp = model.config.tensor_model_parallel_size
            rows = rows_of(target, arch, tp)
            name = f"decoder.layers.{layer.layer_number - 1}.{MODULES[target]}.lora_A"
            shape = (len(rows.sizes) * lora.rank, input_size(target, arch))
            whole = torch.empty(shape) if module.weight.is_meta else initial_values(name, seed, *shape)
            columns = whole.chunk(tp, dim=1)[place.tp] if module.split[0] == 1 else whole
            module.adapt(target, lora, rows, columns)
    config = model.config
    again = config.recompute_granularity
    if model.pre_process and (again == "full" or (again == "selective" and "mlp" in config.recompute_modules)):
        model.embedding.register_forward_hook(_ask_for_gradients)


def initial_values(name: str, seed: int, rows: int, columns: int) -> Tensor:
    """Draw the whole A: float32 [rows, columns], uniform in +-1 / sqrt(columns).

    The paper's code and PEFT draw it so (Kaiming, a = sqrt 5); section 4.1 itself says a random Gaussian.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return (torch.rand(rows, columns, generator=generator) * 2 - 1) / math.sqrt(columns)


def _ask_for_gradients(module: torch.nn.Module, args: object, output: Tensor) -> None:
    """Make the frozen embedding's output require a gradient: recomputed layers with an input without one get none."""
    if torch.is_grad_enabled():
        output.requires_grad_()


def adapted_weights(chunks: Sequence[GPTModel]) -> Iterator[tuple[torch.nn.Parameter, _Adapted]]:
    """Yield every adapted weight of this rank, and its linear map."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, _Adapted):
                yield module.weight, module
