"""Which keys of config.json ask for a tensor and its shape, for the message where a file has another."""

from __future__ import annotations

import re
from collections.abc import Collection

from megasharp.convert.architecture import Architecture, Dimension
from megasharp.convert.families import Family

_LAYER = re.compile(r"(?<=^model\.layers\.)\d+(?=\.)")
_HEAD = "lm_head.weight"


def keys_of_shape(family: Family, arch: Architecture, name: str, found: tuple[int, ...]) -> str:
    """The keys, with their values, of the dimensions of the tensor `name` that a shape does not have.

    Example: "num_key_value_heads=4 x head_dim=16".
    """
    dimensions = _dimensions(family, arch, name)
    sizes = arch.shape(dimensions)
    same_rank = len(found) == len(sizes)
    wrong = [dimension for axis, dimension in enumerate(dimensions) if not same_rank or found[axis] != sizes[axis]]
    return ", ".join(_keys(arch, dimension) for dimension in dict.fromkeys(wrong))


def key_of_presence(arch: Architecture, name: str, stored: Collection[str]) -> str | None:
    """The key, with its value, by which a model has the tensor `name` or has it not; None where no single one does.

    `stored` are the names in the files: where others of the tensor's layer are there, it is not the number of layers.
    """
    if name == _HEAD:
        return f"tie_word_embeddings={str(arch.tied).lower()}"
    layer = _LAYER.search(name)
    if layer is None:
        return None
    stored_too = any(other.startswith(f"model.layers.{layer.group()}.") for other in stored)
    is_beyond = int(layer.group()) >= arch.num_layers
    return f"num_hidden_layers={arch.num_layers}" if is_beyond or not stored_too else None


def _dimensions(family: Family, arch: Architecture, name: str) -> tuple[Dimension, ...]:
    pattern = _LAYER.sub("{layer}", name)
    return next(
        shape
        for rule in family.present(arch)
        for hf_name, shape in zip(rule.hf, rule.shapes, strict=True)
        if hf_name == pattern
    )


def _keys(arch: Architecture, dimension: Dimension) -> str:
    head_dim = f"head_dim={arch.head_dim}"
    keys: dict[Dimension, str] = {
        "vocab": f"vocab_size={arch.vocab}",
        "hidden": f"hidden_size={arch.hidden}",
        "head_dim": head_dim,
        "query_size": f"num_attention_heads={arch.heads} x {head_dim}",
        "kv_size": f"num_key_value_heads={arch.kv_heads} x {head_dim}",
        "ffn": f"intermediate_size={arch.ffn}",
    }
    return keys[dimension]
