"""Hugging Face folder <-> Megatron checkpoint folder, whole models, one process.

A Megatron folder holds `policy/` (torch_dist shards, loadable at any TP x PP) and `hf/` (config and tokenizer files),
so it can be turned back without anything else. A run's checkpoints have the same two parts.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch._C._distributed_c10d import HashStore

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import Family
from megasharp.convert.hf_folder import HFReader, carry_over, read_config, write_hf_folder
from megasharp.errors import UserError, disk_is_full, one_line
from megasharp.mcore.model import build_chunks, transformer_config
from megasharp.mcore.parallel import Place, destroy, initialize, megatron_device
from megasharp.mcore.state import load_model, save_model
from megasharp.mcore.weights import export_stage, load_hf
from megasharp.types import ParallelLayout, as_dtype

_DEVICE = torch.device("cpu")


@contextmanager
def _model(folder: Path) -> Iterator[tuple[list[GPTModel], Family, Architecture, Place]]:
    """An unfilled model of the folder's configuration, alone in a process group of its own."""
    _, family, arch = read_config(folder)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with megatron_device(_DEVICE):
            place = initialize(ParallelLayout(), seed=0)
            try:
                config = transformer_config(arch, ParallelLayout(), as_dtype(arch.dtype), "none", {})
                yield build_chunks(config, arch, place), family, arch, place
            finally:
                destroy()
    finally:
        dist.destroy_process_group()


def hf_to_megatron(source: Path, target: Path) -> None:
    """Convert; `target` must not exist and appears only when complete. Raises UserError in one line."""
    if target.exists():
        raise UserError(f"{target}: exists already; choose another name or remove it")
    with HFReader(source) as reader, _model(source) as (model, family, arch, place):
        load_hf(model, reader, family, arch, place)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            (partial / "policy").mkdir()
            save_model(partial / "policy", model)
            (partial / "hf").mkdir()
            carry_over(source, partial / "hf")
            partial.chmod(0o755)
            partial.rename(target)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if disk_is_full(error):
                raise UserError(f"{target}: no space left on the disk; nothing was written") from error
            raise


def megatron_to_hf(source: Path, target: Path) -> None:
    """Convert a Megatron folder or a run's checkpoint. Raises UserError in one line."""
    for part in ("policy", "hf"):
        if not (source / part).is_dir():
            raise UserError(f"{source}: not a Megatron checkpoint folder: {part}/ is missing")
    with _model(source / "hf") as (model, family, arch, place):
        try:
            load_model(source / "policy", model)
        except Exception as error:  # the loader raises many kinds for damaged shards
            raise UserError(f"{source / 'policy'}: cannot be read: {one_line(error)}") from error
        write_hf_folder(target, source / "hf", export_stage(model, family, arch, place))
