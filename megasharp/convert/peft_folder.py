"""A PEFT adapter folder: the trained A and B of every projection, without the weights they were trained beside."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from megasharp.convert.lora import LoraSettings

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"

# A Hugging Face weight, its A [rank, inputs] and its B [outputs, rank].
Projection = tuple[str, Tensor, Tensor]


def fill_peft_folder(
    folder: Path, lora: LoraSettings, base: str | None, projections: Iterable[Projection]
) -> dict[str, Tensor]:
    """Write both files into the existing empty folder; gives the tensors by PEFT's names.

    `base` is the folder of the model that the adapters belong to, where it is known.
    """
    tensors: dict[str, Tensor] = {}
    modules = set()
    for weight, a, b in projections:
        module = weight.removesuffix(".weight")
        modules.add(module.rsplit(".", 1)[-1])
        for name, tensor in (("lora_A", a), ("lora_B", b)):
            # Views of one tensor cannot lie in one file.
            tensors[f"base_model.model.{module}.{name}.weight"] = tensor.clone()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    # save_file would make a file that its owner alone may read.
    (folder / ADAPTER_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return tensors
