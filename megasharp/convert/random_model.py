"""Model folders with random weights, for trials on machines without a model: real sizes of heads, no download."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from megasharp.convert.hf_folder import expected_hf_shapes, read_config
from megasharp.convert.hf_write import carry_over, write_hf_folder
from megasharp.convert.model_folder import CONFIG_FILE


def write_random_model(base: Path, target: Path, sizes: Mapping[str, object], dtype: torch.dtype, seed: int) -> None:
    """Write the model folder `target`: `base`'s description and tokenizer, other `sizes` of config.json, drawn weights.

    Weights are normal with variance 1 / inputs, so that next-token distributions are far from uniform; norms are ones.

    Raises:
        UserError: `base` is not a supported model folder, `target` exists, or the disk refuses.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as name:
        described = Path(name)
        carry_over(base, described)
        config = json.loads((described / CONFIG_FILE).read_text(encoding="utf-8")) | dict(sizes)
        # Its kinds of layers are read anew from their number.
        config.pop("layer_types", None)
        (described / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        _, family, architecture = read_config(described)
        write_hf_folder(target, described, _drawn(expected_hf_shapes(family, architecture), dtype, seed))


def _drawn(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        if len(shape) == 1:
            yield name, torch.zeros(shape, dtype=dtype) if name.endswith("bias") else torch.ones(shape, dtype=dtype)
        else:
            yield name, torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).to(dtype)
