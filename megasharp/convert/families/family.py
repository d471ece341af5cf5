"""A model family: the reader of its config, and the table of its parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.mapping import Rule, Shard

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


def is_of_expert(name: str) -> bool:
    """Return True for the Megatron name of a parameter that belongs to one expert."""
    return _EXPERT.search(name) is not None


@dataclass(frozen=True, slots=True)
class Location:
    """The layer of a parameter, and its expert in it: numbers over the whole model, 0 where it has none.

    `name(pattern)` writes them into a name's `{layer}` and `{expert}`.
    """

    layer: int = 0
    expert: int = 0

    def name(self, pattern: str) -> str:
        """Return the name that `pattern` stands for here."""
        return pattern.format(layer=self.layer, expert=self.expert)


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

    def rule_for(self, arch: Architecture, name: str) -> tuple[Rule, Location]:
        """Find the rule of a Megatron parameter, whose name has numbers over the whole model, and where it is.

        Raises:
            KeyError: the model has no such parameter.
        """
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        at = Location(int(layer.group()) if layer else 0, int(expert.group()) if expert else 0)
        pattern = _EXPERT.sub("{expert}", _LAYER.sub("{layer}", name))
        experts = arch.experts.count if arch.experts else 0
        for rule in self.present(arch):
            exists = at.layer < arch.num_layers and (not rule.of_expert or at.expert < experts)
            if exists and pattern in (rule.megatron, *rule.aliases):
                return rule, at
        raise KeyError(f"{arch.family} with {arch.num_layers} layers has no Megatron parameter {name}")

    def locations(self, arch: Architecture, rule: Rule) -> Iterator[Location]:
        """Yield the layers and experts for which `arch` has a parameter by `rule`, in the model's order."""
        experts = arch.experts.count if arch.experts and rule.of_expert else 1
        for layer in range(arch.num_layers if rule.stage == "layer" else 1):
            yield from (Location(layer, expert) for expert in range(experts))

    def parameter_shapes(
        self,
        arch: Architecture,
        tp: int,
        *,
        layers: Iterable[int],
        first_stage: bool,
        last_stage: bool,
        ep: int = 1,
        etp: int = 1,
    ) -> dict[str, tuple[int, ...]]:
        """Return the shape that one tensor-parallel rank has of each of a stage's parameters, by Megatron name.

        Names have global layer numbers, which `layers` are too; the experts are the first of `ep` ranks', each shared
        by `etp`. The shapes are those the rules cut: no weights are read, no memory is taken, and every rank of the
        stage has the same. A tied model's last stage holds a copy of the embedding as `output_layer.weight`, unless it
        is the first stage too.

        Example: a tied model alone on its rank has no `output_layer.weight`; cut by pp=2, both stages hold the
        vocabulary.
        """
        layers = tuple(layers)
        shapes: dict[str, tuple[int, ...]] = {}
        for rule in self.present(arch):
            if not rule.exported and first_stage:
                continue
            whole = [torch.empty(arch.shape(shape), device="meta") for shape in rule.shapes]
            shape = tuple(rule.shard(whole, arch, Shard(0, etp if rule.of_expert else tp)).shape)
            if rule.stage == "layer":
                experts = arch.experts.count // ep if arch.experts and rule.of_expert else 1
                locations = (Location(layer, expert) for layer in layers for expert in range(experts))
                shapes.update((at.name(rule.megatron), shape) for at in locations)
            elif first_stage if rule.stage == "first" else last_stage:
                shapes[rule.megatron] = shape
        return shapes
