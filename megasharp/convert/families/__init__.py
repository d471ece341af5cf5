"""The model families, by the architecture name in config.json. A new family is one file and one row here."""

from __future__ import annotations

from megasharp.convert.architecture import Architecture
from megasharp.convert.families.family import Family
from megasharp.convert.families.llama import LLAMA
from megasharp.convert.families.mistral import MINISTRAL, MISTRAL
from megasharp.convert.families.mixtral import MIXTRAL
from megasharp.convert.families.olmo2 import OLMO2
from megasharp.convert.families.qwen2 import QWEN2
from megasharp.convert.families.qwen3 import QWEN3
from megasharp.convert.families.qwen3_moe import QWEN3_MOE

_ALL = (QWEN3, QWEN3_MOE, QWEN2, LLAMA, MISTRAL, MINISTRAL, MIXTRAL, OLMO2)
FAMILIES: dict[str, Family] = {family.hf_name: family for family in _ALL}

__all__ = ["FAMILIES", "Family", "family_of"]


def family_of(architecture: Architecture) -> Family:
    """Return the family whose rules name the architecture's tensors."""
    return next(family for family in _ALL if architecture.family in family.model_types)
