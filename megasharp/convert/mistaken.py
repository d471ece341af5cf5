"""What a folder seems to be that is not of the kind that was asked for, and what to do: the end of an error's line."""

from __future__ import annotations

from pathlib import Path

from megasharp.convert.peft_folder import ADAPTER_CONFIG
from megasharp.convert.weight_files import CONFIG_FILE

_MEGATRON_PARTS = ("policy", "hf")
# In a run's checkpoints/.
_NEWEST = "latest"


def is_part(folder: Path) -> bool:
    """Whether it is one of the two folders in a Megatron checkpoint folder."""
    return folder.name in _MEGATRON_PARTS and _is_megatron(folder.absolute().parent)


def what_it_is(folder: Path) -> str:
    """A clause that begins with a colon; empty where nothing is known of the folder.

    Example: ": it is a run's folder, give one of its checkpoints, such as runs/mine/checkpoints/step_000300".
    """
    seen = _seen(folder)
    return f": {seen}" if seen else ""


def _seen(folder: Path) -> str:
    if folder.is_file():
        return _of_file(folder)
    for checkpoints in (folder / "checkpoints", folder):
        steps = sorted(path for path in checkpoints.glob("step_*") if path.is_dir())
        if steps:
            return f"it is a run's folder, give one of its checkpoints, such as {steps[-1]}"
    if is_part(folder):
        return f"it is a part of a Megatron checkpoint folder, give the whole: {folder.absolute().parent}"
    if _is_megatron(folder):
        return "it is a Megatron checkpoint folder, `megasharp convert megatron-to-hf` makes the other kind of it"
    if (folder / CONFIG_FILE).is_file():
        return "it is a Hugging Face folder, `megasharp convert hf-to-megatron` makes the other kind of it"
    if (folder / ADAPTER_CONFIG).is_file():
        return "it has adapters only, merge them into their base model with PEFT (merge_and_unload) and save that"
    snapshots = sorted((folder / "snapshots").glob("*"))
    if snapshots:
        return f"it is the hub's cache of a model, give one of its snapshots, such as {snapshots[-1]}"
    return "" if folder.exists() else "it does not exist"


def _of_file(path: Path) -> str:
    if path.name == _NEWEST:
        checkpoint = path.parent / path.read_text(encoding="utf-8").strip()
        if checkpoint.is_dir():
            return (
                f"it is a file that names a run's newest checkpoint, which is another after its next: give {checkpoint}"
            )
    return "it is a file"


def _is_megatron(folder: Path) -> bool:
    return all((folder / part).is_dir() for part in _MEGATRON_PARTS)
