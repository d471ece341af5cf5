"""A model family: the reader of its config, and the table of its parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.mapping import Rule, Shard

_LAYER_NUMBER = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture: `hf_name` is what its config.json lists under `architectures`.

    `model_types` are the kinds of config that `architecture` can read, as config.json names them.
    """

    hf_name: str
    model_types: tuple[str, ...]
    architecture: Callable[[PretrainedConfig], Architecture]
    rules: tuple[Rule, ...]

    def present(self, arch: Architecture) -> Iterator[Rule]:
        """Yield the rules of the parameters that `arch` has."""
        return (rule for rule in self.rules if rule.when(arch))

    def rule_for(self, arch: Architecture, name: str) -> tuple[Rule, int]:
        """Find the rule of a Megatron parameter, and its global layer number (0 outside the layers).

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

    def parameter_shapes(
        self, arch: Architecture, tp: int, *, layers: Iterable[int], first_stage: bool, last_stage: bool
    ) -> dict[str, tuple[int, ...]]:
        """Return the shape that one tensor-parallel rank has of each of a stage's parameters, by Megatron name.

        Names have global layer numbers, which `layers` are too. The shapes are those the rules cut: no weights are
        read, no memory is taken, and every rank of the stage has the same. A tied model's last stage holds a copy of
        the embedding as `output_layer.weight`, unless it is the first stage too.

        Example: a tied model alone on its rank has no `output_layer.weight`; cut by pp=2, both stages hold the
        vocabulary.
        """
        layers = tuple(layers)
        shapes: dict[str, tuple[int, ...]] = {}
        for rule in self.present(arch):
            if not rule.exported and first_stage:
                continue
            whole = [torch.empty(arch.shape(shape), device="meta") for shape in rule.shapes]
            shape = tuple(rule.shard(whole, arch, Shard(0, tp)).shape)
            if rule.stage == "layer":
                shapes.update((rule.megatron.format(layer=layer), shape) for layer in layers)
            elif first_stage if rule.stage == "first" else last_stage:
                shapes[rule.megatron] = shape
        return shapes
