"""What a model family is: how to read its config, and the table of its parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.mapping import Rule

_LAYER_NUMBER = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture: `hf_name` is what its config.json lists under `architectures`."""

    hf_name: str
    architecture: Callable[[PretrainedConfig], Architecture]
    rules: tuple[Rule, ...]

    def present(self, arch: Architecture) -> Iterator[Rule]:
        """The rules of the parameters that `arch` has."""
        return (rule for rule in self.rules if rule.when(arch))

    def rule_for(self, arch: Architecture, name: str) -> tuple[Rule, int]:
        """The rule of a Megatron parameter, and its global layer number (0 outside the layers).

        Raises:
            KeyError: the model has no such parameter.
        """
        number = _LAYER_NUMBER.search(name)
        layer = int(number.group()) if number else 0
        pattern = _LAYER_NUMBER.sub("{layer}", name)
        for rule in self.present(arch):
            if pattern in (rule.megatron, *rule.aliases) and layer < arch.num_layers:
                return rule, layer
        raise KeyError(f"{arch.family} with {arch.num_layers} layers has no Megatron parameter {name}")
