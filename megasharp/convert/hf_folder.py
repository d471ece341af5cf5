"""Hugging Face checkpoint folders: opened with every name and shape checked, written whole or not at all.

Nothing here reaches the network. Formats: https://github.com/huggingface/safetensors#format, and the file
`model.safetensors.index.json` as transformers writes it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import FAMILIES, Family
from megasharp.convert.shards import expected_hf_shapes
from megasharp.errors import UserError, disk_is_full, one_line
from megasharp.files import flush

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_CARRIED_FILES = (
    "generation_config.json",
    *_TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_CARRIED_FOLDERS = ("additional_chat_templates",)
_FLOATING = ("F64", "F32", "F16", "BF16")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def read_config(folder: str | Path) -> tuple[PretrainedConfig, Family, Architecture]:
    """What a checkpoint folder's config.json describes; no weights are touched.

    Raises:
        UserError: the folder or config.json is missing or unreadable, or the model is not supported.
    """
    folder = Path(folder)
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise UserError(f"checkpoint folder {folder} does not exist: give a Hugging Face model folder")
    name = _architecture_name(path)
    if name not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise UserError(f"{path}: architecture {name} is not supported (supported: {supported})")
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    # transformers reports a bad value with whatever the attribute happened to raise.
    except Exception as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    family = FAMILIES[name]
    return config, family, family.architecture(config)


def check_tokenizer(folder: str | Path, arch: Architecture) -> None:
    """Check that every token id of the folder's tokenizer is a row of the model's vocabulary.

    Raises:
        UserError: no tokenizer, an unreadable one, or an id >= `arch.vocab`.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(f"no tokenizer in {folder}: expected tokenizer.json next to the model's config.json")
    try:
        vocabulary = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).get_vocab()
    except Exception as error:
        raise UserError(f"the tokenizer in {folder} cannot be read: {one_line(error)}") from error
    token, highest = max(vocabulary.items(), key=lambda item: item[1])
    if highest >= arch.vocab:
        raise UserError(
            f"tokenizer/model vocabulary mismatch: token {token!r} of {folder} has id {highest}, but "
            f"{arch.folder or 'the model'} has vocab_size={arch.vocab}: use the model's own tokenizer"
        )


class HFReader:
    """A checked checkpoint folder that hands out one tensor at a time, memory-mapped.

    `config`, `family` and `architecture` say what the model is. Opening reads headers only (and, where a tied
    model stores a head all the same, that head).

    Raises:
        UserError: anything `read_config` refuses; weights that are missing or truncated; a tensor that is
            missing, extra, misshapen or not floating point.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config, self.family, self.architecture = read_config(folder)
        self._stack = ExitStack()
        try:
            self._files = _weight_files(self.folder)
            paths = sorted(set(self._files.values()))
            self._handles = {path: self._stack.enter_context(_open(path)) for path in paths}
            self._files |= self._unindexed()
            self._check()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self._stack.close()

    def names(self) -> list[str]:
        """Names of all tensors the model needs; a tied model's spare lm_head.weight is not among them."""
        return list(expected_hf_shapes(self.family, self.architecture))

    def tensor(self, name: str) -> Tensor:
        """The whole tensor `name` in its stored dtype: a view of the mapped file, to be cloned if kept.

        Raises:
            UserError: the file cannot be read any more.
        """
        path = self._files[name]
        try:
            tensor: Tensor = self._handles[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: tensor {name} cannot be read: {one_line(error)}") from error
        return tensor

    def _unindexed(self) -> dict[str, Path]:
        """Tensors that sit in the files without an entry in the index."""
        found = {name: path for path, handle in self._handles.items() for name in _names(handle)}
        return {name: path for name, path in found.items() if name not in self._files}

    def _check(self) -> None:
        expected = expected_hf_shapes(self.family, self.architecture)
        for name, shape in expected.items():
            if name not in self._files:
                raise UserError(f"tensor {name} is missing from {self.folder}: its config.json asks for it")
            self._check_header(name, shape)
        for name in sorted(self._files.keys() - expected.keys()):
            if not self._is_spare_head(name, expected):
                model = f"the {self.family.hf_name} of its config.json"
                raise UserError(f"{self._files[name]}: extra tensor {name}, which {model} does not have")

    def _check_header(self, name: str, shape: tuple[int, ...]) -> None:
        found, dtype = self._header(name)
        where = f"{self._files[name]}: tensor {name}"
        if found != shape:
            raise UserError(f"{where} has shape {found}, but {self.folder / CONFIG_FILE} asks for {shape}")
        if dtype not in _FLOATING:
            supported = ", ".join(_FLOATING)
            raise UserError(f"{where} has dtype {dtype}, not one of {supported}: use an unquantized checkpoint")

    def _is_spare_head(self, name: str, expected: Mapping[str, tuple[int, ...]]) -> bool:
        """Some tied checkpoints store the embedding a second time, as the head."""
        if name != _HEAD or not self.architecture.tied or self._header(name)[0] != expected[_EMBEDDING]:
            return False
        # transformers unties a head with values of its own, so dropping it would silently change the model.
        embedding = self.tensor(_EMBEDDING)
        if not torch.equal(self.tensor(_HEAD).to(embedding.dtype), embedding):
            path = self.folder / CONFIG_FILE
            raise UserError(f"{path} ties {_HEAD} to {_EMBEDDING}, but they differ: set tie_word_embeddings=false")
        return True

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        path = self._files[name]
        try:
            view = self._handles[path].get_slice(name)
        except SafetensorError as error:
            raise UserError(f"{path}: tensor {name} is missing, though {INDEX_FILE} lists it") from error
        return tuple(view.get_shape()), str(view.get_dtype())


def write_hf_folder(
    target: str | Path,
    source_folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = 5 * 1024**3,
) -> None:
    """Write `tensors` as the checkpoint folder `target`, with the config and tokenizer of `source_folder`.

    `tensors` are exactly those of that folder's model, in any order and on any device; each is copied when it
    arrives, and no more than `max_shard_bytes` plus one tensor is held. The folder appears under its name
    complete and on disk, or not at all; its config.json names the dtype written.

    Raises:
        UserError: `target` exists, `source_folder` is not a supported checkpoint, or the disk refuses.
    """
    target, source = Path(target), Path(source_folder)
    _, family, arch = read_config(source)
    expected = expected_hf_shapes(family, arch)
    with _new_folder(target) as folder:
        with _user_errors(target):
            carry_over(source, folder)
        writer = _ShardWriter(folder, target, max_shard_bytes)
        for name, tensor in tensors:
            shape = tuple(tensor.shape)
            assert expected.pop(name) == shape, f"{name} has shape {shape}"
            writer.add(name, tensor)
        assert not expected, f"not written: {sorted(expected)}"
        writer.finish()


class _ShardWriter:
    """Collects tensors and writes a file of them whenever the next one would make it too large."""

    def __init__(self, folder: Path, target: Path, max_bytes: int) -> None:
        self._folder, self._target, self._max_bytes = folder, target, max_bytes
        self._pending: dict[str, Tensor] = {}
        self._written: list[tuple[Path, list[str]]] = []
        self._pending_bytes = self._total_bytes = 0
        self._dtype = ""

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._write_pending()
        # The caller may reuse the memory, or have handed out a slice of a larger buffer.
        kept = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._pending[name] = kept
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes
        self._dtype = str(tensor.dtype).removeprefix("torch.")

    def finish(self) -> None:
        """Write what is left, give the files their names, and put everything on disk."""
        self._write_pending()
        with _user_errors(self._target):
            if len(self._written) == 1:
                self._written[0][0].rename(self._folder / WEIGHTS_FILE)
            else:
                self._write_index()
            _set_dtype(self._folder / CONFIG_FILE, self._dtype)
            for path in (*self._folder.rglob("*"), self._folder):
                flush(path)

    def _write_pending(self) -> None:
        path = self._folder / f"part-{len(self._written)}.safetensors"
        with _user_errors(self._target):
            save_file(self._pending, path, metadata={"format": "pt"})
            # safetensors makes its file private to the user; give it the mode of any other new file.
            path.chmod((self._folder / CONFIG_FILE).stat().st_mode)
        self._written.append((path, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0

    def _write_index(self) -> None:
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._written, start=1):
            file = f"model-{number:05d}-of-{len(self._written):05d}.safetensors"
            path.rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _architecture_name(path: Path) -> str:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: {path.parent} is not a Hugging Face model folder") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    names = raw.get("architectures") if isinstance(raw, dict) else None
    if not isinstance(names, list) or len(names) != 1:
        raise UserError(f"{path}: architectures={names} must be a list of one name, as ['Qwen3ForCausalLM']")
    return str(names[0])


def _weight_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor; a single file wins over an index, as in transformers."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        with _open(single) as handle:
            return dict.fromkeys(_names(handle), single)
    if not index.is_file():
        raise UserError(f"no safetensors weights in {folder}: expected {WEIGHTS_FILE} or {INDEX_FILE}")
    files = {name: folder / file for name, file in _weight_map(index).items()}
    for path in sorted(set(files.values())):
        if not path.is_file():
            raise UserError(f"{index} names {path.name}, which does not exist: complete the download")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
        weight_map = {str(name): str(file) for name, file in raw["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} cannot be read: {type(error).__name__}: {one_line(error)}") from error
    return weight_map


def _names(handle: safe_open) -> list[str]:
    names: list[str] = handle.keys()  # type: ignore[no-untyped-call]
    return names


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or not a safetensors file: {one_line(error)}") from error


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A hidden sibling of `target` that takes its name when the block succeeds and goes when it fails."""
    if target.exists():
        raise UserError(f"{target} already exists: remove it or choose another folder")
    folder = target.parent / f".{target.name}.partial-{uuid4().hex[:8]}"
    try:
        with _user_errors(target):
            folder.mkdir(parents=True)
        yield folder
        with _user_errors(target):
            folder.rename(target)
            flush(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _user_errors(target: Path) -> Iterator[None]:
    """Turn what the disk says while writing `target` into one line for the user."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if disk_is_full(error):
            raise UserError(f"no space left for {target}: free some and repeat ({one_line(error)})") from error
        raise UserError(f"{target} cannot be written: {one_line(error)}") from error


def carry_over(source: Path, folder: Path) -> None:
    """Copy what describes a model besides its weights: configuration, tokenizer files, chat template."""
    for name in (CONFIG_FILE, *_CARRIED_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for name in _CARRIED_FOLDERS:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name, copy_function=shutil.copyfile)


def _set_dtype(path: Path, dtype: str) -> None:
    """transformers loads in the dtype config.json names, which would round weights written in a wider one."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if dtype not in (config.get("dtype"), config.get("torch_dtype")):
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
