"""A checkpoint with adapters, as a run saves one, without a run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megasharp.config.policy import LoraConfig
from megasharp.convert.architecture import record_arguments
from megasharp.convert.hf_folder import HFReader, megatron_tensor
from megasharp.convert.hf_write import carry_over
from megasharp.convert.lora import TARGETS, is_adapter, record_adapters
from megasharp.learner.checkpoint_stream import cut, write_streamed
from megasharp.learner.meta_models import alone, blank_model

LORA = LoraConfig(rank=3, alpha=6.0, targets=list(TARGETS))


def save_adapted(base: Path, folder: Path, scale: float = 0.1) -> None:
    """Write the model in `base` with random adapters beside its weights; `scale` is that of A's and B's values."""
    (folder / "policy").mkdir(parents=True)
    (folder / "hf").mkdir()
    generator = torch.Generator().manual_seed(0)
    with HFReader(base) as reader, alone() as place:
        dtype = reader.dtype(reader.names()[0])
        model = blank_model(reader.architecture, place, dtype, LORA)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

        def value(name: str) -> Tensor:
            if is_adapter(name):
                return scale * torch.randn(shapes[name], generator=generator)
            return megatron_tensor(reader, reader.family, reader.architecture, name, 0, 1)

        write_streamed(folder / "policy", cut(model), dtype, value, lambda _: 0)
        record_arguments(folder, reader.architecture)
    carry_over(base, folder / "hf")
    record_adapters(folder / "policy", LORA, base)
