"""The real Megatron model of a large layout, built without memory and without its other ranks.

Weights are on torch's meta device and the process group is torch's fake one, at the full world size: what Megatron
itself refuses or shapes is found on one machine, in seconds. The fake group is global state, so this is a program:

    python -m megasharp.mcore.meta '{"folders": ["path/to/hf"], "dp": 2, "tp": 8, "pp": 2, "cp": 1, "vpp": 1}'

prints, per folder, the number of parameters that the first tensor-parallel rank of each pipeline stage holds. The
first folder's model may have adapters: `"lora": {"rank": 8, "alpha": 16.0, "targets": ["qkv"]}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megasharp.convert.hf_folder import read_config
from megasharp.convert.lora import LoraSettings
from megasharp.mcore.model import build_chunks, transformer_config
from megasharp.mcore.parallel import destroy, initialize, megatron_device
from megasharp.types import ParallelLayout


def stage_parameters(
    folders: Sequence[Path], layout: ParallelLayout, lora: LoraSettings | None = None
) -> list[list[int]]:
    """Parameters on the first rank of each pipeline stage, per folder; only config.json is read. `lora`: of the first.

    Call where no process group is initialised. Raises UserError for a folder that is no supported model, and whatever
    Megatron raises for a layout that it cannot build.
    """
    width = layout.world // layout.pp
    counts = [_on_rank(folders, layout, lora, stage * width) for stage in range(layout.pp)]
    return [list(of_folder) for of_folder in zip(*counts, strict=True)]


def _on_rank(folders: Sequence[Path], layout: ParallelLayout, lora: LoraSettings | None, rank: int) -> list[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        with megatron_device(torch.device("cpu")):
            place = initialize(layout, seed=1, gloo=False)
            counts = []
            for number, folder in enumerate(folders):
                _, _, arch = read_config(folder)
                config = transformer_config(arch, layout, torch.bfloat16, "none", {})
                with torch.device("meta"):
                    chunks = build_chunks(config, arch, place, lora if number == 0 else None)
                counts.append(sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()))
            destroy()
            return counts
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Read the request from the first argument; print the counts as JSON."""
    request = json.loads(sys.argv[1])
    layout = ParallelLayout(**{name: request[name] for name in ("dp", "tp", "pp", "cp", "vpp")})
    given = request.get("lora")
    lora = LoraSettings(given["rank"], given["alpha"], tuple(given["targets"])) if given else None
    print(json.dumps(stage_parameters([Path(folder) for folder in request["folders"]], layout, lora)))


if __name__ == "__main__":
    main()
