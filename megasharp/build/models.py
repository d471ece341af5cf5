"""The models that a run begins with: what is checked of their folders before anything starts, and what once it does."""

from __future__ import annotations

from pathlib import Path

from megasharp.checkpoint.store import MANIFEST, CheckpointStore
from megasharp.config.paths import find
from megasharp.convert.architecture import Architecture
from megasharp.convert.hf_folder import HFReader, check_tokenizer
from megasharp.convert.lora import recorded_adapters
from megasharp.convert.model_folder import ModelFolder, model_folder
from megasharp.errors import UserError


def open_model(path: str) -> tuple[ModelFolder, Architecture]:
    """The folder that a configuration names, with every tensor's name and shape checked, and the tokenizer.

    Raises:
        UserError: there is no model, it is damaged or not supported, or its weights have adapters beside them.
    """
    folder = model_folder(find(path))
    architecture = _open_megatron(folder.path) if folder.is_megatron else _open_hf(folder.path)
    check_tokenizer(folder.description, architecture)
    return folder, architecture


def check_content(folder: ModelFolder) -> None:
    """Read Megatron weights whole and compare them with what was written, by the record of whoever wrote them.

    Nothing else would see changed bytes. What there is no record of is taken as it is, as Hugging Face's folders are.

    Raises:
        UserError: they are not what was written.
    """
    if not folder.is_megatron:
        return
    if (folder.path / MANIFEST).is_file():
        problem = CheckpointStore.problem(folder.path)
        if problem is not None:
            raise UserError(f"{problem}: name another checkpoint as the model")
        return
    from megasharp.mcore.conversion import MegatronWeights

    for _ in MegatronWeights(folder.path).tensors():
        pass


def _open_hf(path: Path) -> Architecture:
    with HFReader(path) as reader:
        return reader.architecture


def _open_megatron(path: Path) -> Architecture:
    if recorded_adapters(path / "policy") is not None:
        raise UserError(
            f"{path} holds adapters beside frozen weights: merge them with `megasharp convert megatron-to-hf {path} "
            "FOLDER` and name that folder"
        )
    # Imported here: Megatron takes seconds to import.
    from megasharp.mcore.conversion import MegatronWeights

    return MegatronWeights(path).architecture
