"""Hugging Face checkpoint folders, opened with every name and shape checked, and their tensors turned into Megatron's.

A folder's config.json gives the family and the architecture, and these the names and shapes of all tensors. A reader
checks the files against them; where a file differs, the message names the keys of config.json that ask for something
else. Then one Megatron parameter at a time is filled from the checkpoint, or turned back into it. Nothing here reaches
the network.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from megasharp.common.errors import UserError, one_line, reason_at
from megasharp.common.lean_transformers import AutoConfig, AutoTokenizer
from megasharp.convert.architecture import Architecture, Dimension, Experts
from megasharp.convert.config_text import architecture_name, check_values, read_text
from megasharp.convert.families import FAMILIES, Family
from megasharp.convert.families.dense_decoder import EMBEDDING, HEAD
from megasharp.convert.mapping import Shard
from megasharp.convert.model_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    open_weights,
    tensor_names,
    tensors_by_file,
    weight_files,
    what_it_is,
    where_looked_for,
)

# Keys of config.json by which families count their experts.
_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# The dtypes of weights, by safetensors' names.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_config(folder: str | Path) -> tuple[PretrainedConfig, Family, Architecture]:
    """Read the model that a checkpoint folder's config.json describes; no weights are touched.

    Raises:
        UserError: the folder or config.json is missing or unreadable, or the model is not supported.
    """
    folder = Path(folder)
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise UserError(f"{folder} is not a Hugging Face model folder{what_it_is(folder)}")
    raw = read_text(path)
    name = architecture_name(path, raw)
    if name not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        experts = ", a mixture of experts," if _EXPERTS & raw.keys() else ""
        raise UserError(f"{path}: architecture {name}{experts} is not supported (supported: {supported})")
    family = FAMILIES[name]
    kind, expected = raw.get("model_type"), " or ".join(family.model_types)
    if kind is None:
        raise UserError(f"{path}: model_type is missing: architecture {name}'s is {expected}")
    if kind not in family.model_types:
        raise UserError(f"{path}: model_type={kind} is not architecture {name}'s (expected: {expected})")
    check_values(path, raw)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    # transformers reports a bad value with whatever the attribute happened to raise.
    except Exception as error:
        raise UserError(f"{path} cannot be read: {reason_at(error, path)}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{path}: quantization_config is set: use an unquantized checkpoint, or remove the key if this one is"
        )
    return config, family, family.architecture(config)


def check_tokenizer(folder: str | Path, arch: Architecture) -> None:
    """Check that every token id of the folder's tokenizer is a row of the model's vocabulary.

    Raises:
        UserError: no tokenizer, an unreadable one, or an id >= `arch.vocab`.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"no tokenizer in {folder}: expected tokenizer.json next to the model's config.json")
    try:
        vocabulary = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        ).get_vocab()
    except Exception as error:
        raise UserError(f"the tokenizer in {folder} cannot be read: {one_line(error)}") from error
    token, highest = max(vocabulary.items(), key=lambda item: item[1])
    if highest >= arch.vocab:
        raise UserError(
            f"tokenizer/model vocabulary mismatch: token {token!r} of {folder} has id {highest}, but "
            f"{arch.folder or 'the model'} has vocab_size={arch.vocab}: use the model's own tokenizer"
        )


def expected_hf_shapes(family: Family, arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of such a model's checkpoint; a tied one has no lm_head.weight."""
    return {
        at.name(hf_name): arch.shape(shape)
        for rule in family.present(arch)
        if rule.exported
        for hf_name, shape in zip(rule.hf, rule.shapes, strict=True)
        for at in family.locations(arch, rule)
    }


class HFReader:
    """A checked checkpoint folder that hands out one tensor at a time, memory-mapped.

    `config`, `family` and `architecture` say what the model is. Opening reads headers only (and, where a tied
    model stores a head all the same, that head).

    Raises:
        UserError: anything `read_config` refuses; weights that are missing or truncated; a tensor that is
            missing, extra, in two files, misshapen or not floating point.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config, self.family, self.architecture = read_config(folder)
        self._stack = ExitStack()
        try:
            self._files = weight_files(self.folder)
            self._handles = {
                path: self._stack.enter_context(open_weights(path, names))
                for path, names in tensors_by_file(self._files).items()
            }
            # Tensors in the files without an entry in the index count too.
            indexed, seen = frozenset(self._files), dict[str, Path]()
            for path, handle in self._handles.items():
                for name in tensor_names(handle):
                    if name in seen:
                        raise UserError(f"tensor {name} is in {seen[name]} and in {path}: only one can be meant")
                    seen[name] = path
            self._files |= {name: path for name, path in seen.items() if name not in indexed}
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
        """Return the names of all tensors the model needs; a tied model's spare lm_head.weight is not among them."""
        return list(expected_hf_shapes(self.family, self.architecture))

    def file(self, name: str) -> Path:
        """Return the file that holds the tensor `name`."""
        return self._files[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that the tensor `name` is stored in."""
        return DTYPES[self._header(name)[1]]

    def tensor(self, name: str) -> Tensor:
        """Return the whole tensor `name` in its stored dtype: a view of the mapped file, to be cloned if kept.

        Raises:
            UserError: the file cannot be read any more.
        """
        path = self._files[name]
        try:
            # A mapping of its own, which ends with the tensor: what was read of a file counts as this process's memory
            # for as long as the file is mapped.
            with safe_open(path, framework="pt") as handle:
                tensor: Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: tensor {name} cannot be read: {one_line(error)}") from error
        return tensor

    def _check(self) -> None:
        """Compare names, shapes and dtypes in the files with those that config.json asks for."""
        expected, config = expected_hf_shapes(self.family, self.architecture), self.folder / CONFIG_FILE
        for name, shape in expected.items():
            if name not in self._files:
                where = where_looked_for(self.folder)
                raise UserError(f"tensor {name} is missing from {where}: {config} asks for it{self._by_key(name)}")
            found, dtype = self._header(name)
            where = f"{self._files[name]}: tensor {name}"
            if found != shape:
                asked = f"{shape} by {keys_of_shape(self.family, self.architecture, name, found)}"
                raise UserError(f"{where} has shape {found}, but {config} asks for {asked}")
            if dtype not in DTYPES:
                supported = ", ".join(DTYPES)
                raise UserError(f"{where} has dtype {dtype}, not one of {supported}: use an unquantized checkpoint")
        for name in sorted(self._files.keys() - expected.keys()):
            if not self._is_spare_head(name, expected):
                model = f"the {self.family.hf_name} of its config.json"
                fault = f"extra tensor {name}, which {model} does not have{self._by_key(name)}"
                raise UserError(f"{self._files[name]}: {fault}")

    def _by_key(self, name: str) -> str:
        key = key_of_presence(self.architecture, name, self._files)
        return "" if key is None else f" ({key})"

    def _is_spare_head(self, name: str, expected: Mapping[str, tuple[int, ...]]) -> bool:
        """Recognize the embedding that some tied checkpoints store a second time, as the head."""
        if name != HEAD or not self.architecture.tied or self._header(name)[0] != expected[EMBEDDING]:
            return False
        # transformers unties a head with values of its own, so dropping it would silently change the model.
        embedding = self.tensor(EMBEDDING)
        if not torch.equal(self.tensor(HEAD).to(embedding.dtype), embedding):
            path = self.folder / CONFIG_FILE
            raise UserError(f"{path} ties {HEAD} to {EMBEDDING}, but they differ: set tie_word_embeddings=false")
        return True

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        path = self._files[name]
        try:
            view = self._handles[path].get_slice(name)
        except SafetensorError as error:
            raise UserError(f"{path}: tensor {name} is missing, though {INDEX_FILE} lists it") from error
        return tuple(view.get_shape()), str(view.get_dtype())


_LAYER = re.compile(r"(?<=^model\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def keys_of_shape(family: Family, arch: Architecture, name: str, found: tuple[int, ...]) -> str:
    """Return the keys, with their values, of the dimensions of the tensor `name` that a shape does not have.

    Example: "num_key_value_heads=4 x head_dim=16".
    """
    head_dim, experts = f"head_dim={arch.head_dim}", arch.experts or Experts(0, 0, 0, True)
    keys: dict[Dimension, str] = {
        "vocab": f"vocab_size={arch.vocab}",
        "hidden": f"hidden_size={arch.hidden}",
        "head_dim": head_dim,
        "query_size": f"num_attention_heads={arch.heads} x {head_dim}",
        "kv_size": f"num_key_value_heads={arch.kv_heads} x {head_dim}",
        "ffn": f"intermediate_size={arch.ffn}",
        "experts": f"{'num_local_experts' if arch.family == 'mixtral' else 'num_experts'}={experts.count}",
        "expert_ffn": f"moe_intermediate_size={experts.ffn}",
    }
    pattern = _EXPERT.sub("{expert}", _LAYER.sub("{layer}", name))
    shapes = {hf: shape for rule in family.present(arch) for hf, shape in zip(rule.hf, rule.shapes, strict=True)}
    dimensions = shapes[pattern]
    sizes = arch.shape(dimensions)
    same_rank = len(found) == len(sizes)
    wrong = [dimension for axis, dimension in enumerate(dimensions) if not same_rank or found[axis] != sizes[axis]]
    return ", ".join(keys[dimension] for dimension in dict.fromkeys(wrong))


def key_of_presence(arch: Architecture, name: str, stored: Collection[str]) -> str | None:
    """Return the key, with its value, by which a model has the tensor `name` or not; None where no single one decides.

    `stored` are the names in the files: where others of the tensor's layer are there, it is not the number of layers.
    """
    if name == HEAD:
        return f"tie_word_embeddings={str(arch.tied).lower()}"
    layer = _LAYER.search(name)
    if layer is None:
        return None
    stored_too = any(other.startswith(f"model.layers.{layer.group()}.") for other in stored)
    is_beyond = int(layer.group()) >= arch.num_layers
    return f"num_hidden_layers={arch.num_layers}" if is_beyond or not stored_too else None


@dataclass(frozen=True, slots=True)
class TensorView:
    """A contiguous part of the whole Hugging Face tensor `name` in the memory of a rank's parameter.

    Its values begin at index `start` in dimension `dim`; all other dimensions are whole.
    """

    name: str
    dim: int
    start: int
    values: Tensor


class TensorReader(Protocol):
    """Anything that gives whole Hugging Face tensors by name; `HFReader` is one."""

    def tensor(self, name: str) -> Tensor:
        """Return the whole tensor called `name`."""
        ...


def megatron_tensor(
    reader: TensorReader,
    family: Family,
    arch: Architecture,
    name: str,
    tp_rank: int,
    tp_size: int,
    vocab_multiple: int = 1,
) -> Tensor:
    """Make one rank's value of the Megatron parameter `name` (numbers over the whole model), in the checkpoint's dtype.

    The rank is `tp_rank` of `tp_size` that share it; an expert's are those of expert tensor parallelism. Contiguous and
    in memory of its own. Vocabulary rows are padded with zeros to `padded_vocab(arch.vocab, tp_size, vocab_multiple)`.

    Raises:
        KeyError: the model has no such parameter.
        UserError: the checkpoint cannot be read.
    """
    rule, at = family.rule_for(arch, name)
    tensors = [reader.tensor(at.name(hf_name)) for hf_name in rule.hf]
    return rule.shard(tensors, arch, Shard(tp_rank, tp_size, vocab_multiple))


def hf_tensors(family: Family, arch: Architecture, name: str, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Make the Hugging Face tensors that the Megatron parameter `name` (numbers over the whole model) stands for.

    `shards` are all tensor-parallel ranks' values in rank order; of a replicated parameter one suffices.
    A tied model's `output_layer.weight` gives none. The result may share memory with `shards`.

    Raises:
        KeyError: the model has no such parameter.
    """
    rule, at = family.rule_for(arch, name)
    if not rule.exported:
        return []
    merged = rule.merge(shards, arch)
    for tensor, shape in zip(merged, rule.shapes, strict=True):
        assert tuple(tensor.shape) == arch.shape(shape), f"{name}: {tuple(tensor.shape)}"
    return [(at.name(hf_name), tensor) for hf_name, tensor in zip(rule.hf, merged, strict=True)]


def hf_views(family: Family, arch: Architecture, name: str, parameter: Tensor, part: Shard) -> Iterator[TensorView]:
    """Yield the parts of Hugging Face tensors in one rank's contiguous Megatron parameter `name`.

    Numbers in the name are those of the whole model. A tied model's `output_layer.weight` gives nothing. Raises
    KeyError where the model has no such parameter.
    """
    rule, at = family.rule_for(arch, name)
    if rule.exported:
        names = [at.name(hf_name) for hf_name in rule.hf]
        for view in rule.views(parameter, arch, part):
            yield TensorView(names[view.number], view.dim, view.start, view.values)
