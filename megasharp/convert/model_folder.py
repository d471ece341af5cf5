"""Folders that hold a model: Hugging Face's, Megatron weights with their description, and PEFT's adapters.

A model is loaded from either of the first two; `convert hf-to-megatron` makes folders of the second kind, and every
checkpoint of a run is one. Of a Hugging Face folder the safetensors files are found and opened here
(https://github.com/huggingface/safetensors#format, and `model.safetensors.index.json` as transformers has it). A PEFT
folder has the trained A and B of every projection, without the weights they were trained beside. Where a folder is not
of the kind that was asked for, `what_it_is` ends the error's line with what it seems to be and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megasharp.common.errors import UserError, one_line, reason_at
from megasharp.config.policy import LoraConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Of a safetensors file: its header's length, which comes first.
LENGTH_BYTES = 8
_MEGATRON_PARTS = ("policy", "hf")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`path` as it was named; `is_megatron` where its weights are torch_dist shards."""

    path: Path
    is_megatron: bool

    @property
    def description(self) -> Path:
        """The folder of config.json and the tokenizer."""
        return self.path / "hf" if self.is_megatron else self.path

    @property
    def serves(self) -> bool:
        """True where SGLang can load its weights: neither shards nor a mere description."""
        return not self.is_megatron and any((self.path / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE))

    @property
    def weights(self) -> Path:
        """The folder of the weights."""
        return self.path / "policy" if self.is_megatron else self.path


def model_folder(path: Path) -> ModelFolder:
    """Tell the kind of a folder; one of neither kind counts as Hugging Face's, whose reader says what it is instead."""
    parts = any((path / part).is_dir() for part in _MEGATRON_PARTS)
    return ModelFolder(path, is_megatron=parts and not (path / CONFIG_FILE).is_file())


def weight_files(folder: Path) -> dict[str, Path]:
    """Find the file of each tensor; a single file wins over an index, as in transformers.

    Raises:
        UserError: there are no weights, the single file or the index cannot be read, or a file of the index is missing.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        with open_weights(single) as handle:
            return dict.fromkeys(tensor_names(handle), single)
    if not index.is_file():
        raise UserError(_no_weights(folder))
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
        files = {str(name): folder / str(file) for name, file in raw["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} cannot be read: {type(error).__name__}: {one_line(error)}") from error
    for path, names in tensors_by_file(files).items():
        if not path.is_file():
            raise UserError(
                f"{index} names {path.name}, which does not exist, for {_first_of(names)}: complete the download"
            )
    return files


def tensors_by_file(files: Mapping[str, Path]) -> dict[Path, list[str]]:
    """Return the names that each file should hold, files in the order of their names."""
    found: dict[Path, list[str]] = {path: [] for path in sorted(set(files.values()))}
    for name, path in files.items():
        found[path].append(name)
    return found


def open_weights(path: Path, expected: Sequence[str] = ()) -> safe_open:
    """Open one file, which reads its header; `expected` are tensors that an index says are in it, for the message.

    Raises:
        UserError: it may not be read, is cut short or no safetensors file; names a tensor that is lost, where one is
            known.
    """
    try:
        # Of a file that may not be read, safetensors says that it does not exist.
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason_at(error, path)}") from error
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        lost = _cut_off(path) or expected
        tensors = f", so {_first_of(lost)} cannot be read" if lost else ""
        raise UserError(f"{path} is truncated or not a safetensors file{tensors}: {one_line(error)}") from error


def tensor_names(handle: safe_open) -> list[str]:
    """Return the names of the tensors in an open file."""
    names: list[str] = handle.keys()  # type: ignore[no-untyped-call]
    return names


def where_looked_for(folder: Path) -> str:
    """Name the files that a tensor of the folder could have been in, for a message."""
    single = folder / WEIGHTS_FILE
    if single.is_file():
        return str(single)
    return f"{folder / INDEX_FILE} and the files that it names"


def _no_weights(folder: Path) -> str:
    missing = f"no safetensors weights in {folder}"
    for path in (folder / WEIGHTS_FILE, folder / INDEX_FILE):
        if path.is_symlink():
            return f"{missing}: {path.name} is a link to {path.readlink()}, which does not exist: complete the download"
    if folder.name == "hf" and (folder.parent / "policy").is_dir():
        return f"{missing}: its weights are in {folder.parent / 'policy'}: use megatron-to-hf on {folder.parent}"
    if any(folder.glob("pytorch_model*")):
        return f"{missing}, only pytorch_model files: load them with transformers and save them with save_pretrained"
    if any(folder.glob("adapter_model*")):
        return f"{missing}, only adapters: merge them into their base model with PEFT (merge_and_unload) and save that"
    return f"{missing}: expected {WEIGHTS_FILE} or {INDEX_FILE}"


def _cut_off(path: Path) -> list[str]:
    """The tensors that a file's own header places behind its end; none where the header cannot be read."""
    try:
        with path.open("rb") as file:
            room = int.from_bytes(file.read(LENGTH_BYTES), "little")
            size = path.stat().st_size - LENGTH_BYTES - room
            header = json.loads(file.read(room)) if size >= 0 else {}
        return [name for name, entry in header.items() if name != "__metadata__" and entry["data_offsets"][1] > size]
    # The header is damaged too, in whatever way.
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return []


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]}{more}"


ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# A Hugging Face weight, its A [rank, inputs] and its B [outputs, rank].
Projection = tuple[str, Tensor, Tensor]


def fill_peft_folder(
    folder: Path, lora: LoraConfig, base: str | None, revision: str | None, projections: Iterable[Projection]
) -> dict[str, Tensor]:
    """Write a PEFT folder's two files into the existing empty folder; return the tensors by PEFT's names.

    `base` is the model that the adapters belong to, where it is known: a folder, or the hub's id with its `revision`.
    """
    tensors: dict[str, Tensor] = {}
    modules = set()
    for weight, a, b in projections:
        module = weight.removesuffix(".weight")
        modules.add(module.rsplit(".", 1)[-1])
        for name, tensor in (("lora_A", a), ("lora_B", b)):
            # safetensors refuses views of one tensor in one file.
            tensors[f"base_model.model.{module}.{name}.weight"] = tensor.clone()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **({"revision": revision} if revision else {}),
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


# In a run's checkpoints/.
_NEWEST = "latest"


def is_part(folder: Path) -> bool:
    """Return True for one of the two folders in a Megatron checkpoint folder."""
    return folder.name in _MEGATRON_PARTS and _is_megatron(folder.absolute().parent)


def what_it_is(folder: Path) -> str:
    """Describe a folder in a clause that begins with a colon; empty where nothing is known of it.

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
