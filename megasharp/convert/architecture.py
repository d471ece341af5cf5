"""The sizes and switches of a decoder, as both Hugging Face's and Megatron's builders need them.

Shapes alone do not identify a model: with another rope theta, norm epsilon or window every tensor still fits. So all
arguments of a model are recorded beside Megatron weights, by the names of config.json, and compared when they are read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megasharp.common.errors import UserError, reason_at
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import Routing

Dimension = Literal["vocab", "hidden", "head_dim", "query_size", "kv_size", "ffn", "experts", "expert_ffn"]
RopeValue = float | int | str | bool | tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary settings as the checkpoint's config gives them.

    `theta` is the base wavelength, `scaling` every further key of transformers' `rope_parameters` (factor,
    original_max_position_embeddings, ...), sorted by name so that equal settings compare equal.

    Example: `RopeParameters(1e6, "yarn", (("factor", 4.0), ("original_max_position_embeddings", 32768)))`.
    """

    theta: float
    rope_type: str = "default"
    scaling: tuple[tuple[str, RopeValue], ...] = ()

    def as_dict(self) -> dict[str, RopeValue | list[float]]:
        """The dictionary transformers calls `config.rope_parameters`, enough for its ROPE_INIT_FUNCTIONS."""
        scaling = {key: list(value) if isinstance(value, tuple) else value for key, value in self.scaling}
        return {"rope_theta": self.theta, "rope_type": self.rope_type, **scaling}


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in place of every layer's MLP, without shared experts.

    A router computes softmax over its `count` logits; the token goes to the `per_token` largest, whose outputs are
    summed with the softmax's weights, divided by their own sum where `normalised`. `ffn` is the width of one expert.
    `balance_loss` is the coefficient of the load-balancing loss that the model's config.json names.
    """

    count: int
    per_token: int
    ffn: int
    normalised: bool
    balance_loss: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One decoder. `vocab` is the real vocabulary size (no padding), `dtype` a torch name such as "bfloat16".

    `windows`: the number of positions that a query of each layer sees, its own included; None where it sees all before
    it. Empty where no layer has a window. `experts`: what takes the place of every MLP, whose width `ffn` then has no
    meaning; None in a dense model. `qk_norm`: a norm over each head of queries and keys; `qk_norm_whole`: one over all
    heads of the queries, and one over those of the keys. `post_norm`: a layer's norms are not before attention and MLP,
    but behind them, inside the residual branch. `folder` is where it was read, for error messages only: it takes no
    part in comparisons.
    """

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    rope_parameters: RopeParameters
    max_positions: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: str
    windows: tuple[int | None, ...] = ()
    folder: str = field(default="", compare=False)
    qk_norm_whole: bool = False
    post_norm: bool = False
    experts: Experts | None = None

    @property
    def routing(self) -> Routing | None:
        """The sizes of what says where each token was sent; None in a dense model."""
        experts = self.experts
        return Routing(self.num_layers, experts.per_token, experts.count) if experts else None

    @property
    def query_size(self) -> int:
        """Rows of the query projection: heads * head_dim, which need not equal `hidden`."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """Positions that a query of `layer` (from 0) sees, its own included; None where it sees all before it."""
        return self.windows[layer] if self.windows else None

    @property
    def smallest_window(self) -> int | None:
        """The fewest positions that some layer sees; None where no layer has a window."""
        return min((window for window in self.windows if window is not None), default=None)

    def shape(self, dimensions: tuple[Dimension, ...]) -> tuple[int, ...]:
        """Return the sizes of a symbolic shape, for instance ("vocab", "hidden")."""
        sizes: dict[Dimension, int] = {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "head_dim": self.head_dim,
            "query_size": self.query_size,
            "kv_size": self.kv_size,
            "ffn": self.ffn,
            "experts": self.experts.count if self.experts else 0,
            "expert_ffn": self.experts.ffn if self.experts else 0,
        }
        return tuple(sizes[dimension] for dimension in dimensions)

    def parameter_count(self) -> int:
        """Number of weights; a tied head counts once."""
        return self._count(self.experts.count if self.experts else 1)

    def active_parameter_count(self) -> int:
        """Number of weights that compute one token: of the experts only those that it is sent to."""
        return self._count(self.experts.per_token if self.experts else 1)

    def _count(self, experts: int) -> int:
        projected = self.query_size + 2 * self.kv_size
        attention = self.hidden * (projected + self.query_size)
        bias = projected if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        norms += self.query_size + self.kv_size if self.qk_norm_whole else 0
        router = self.hidden * self.experts.count if self.experts else 0
        mlp = router + experts * 3 * self.hidden * (self.experts.ffn if self.experts else self.ffn)
        layer = attention + bias + norms + mlp
        vocabulary = self.vocab * self.hidden * (1 if self.tied else 2)
        return vocabulary + self.num_layers * layer + self.hidden

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuse a policy's layout by which this model cannot be cut.

        Raises:
            UserError: as `check_parallel`, or `ep * etp` does not divide the ranks of a pipeline stage.
        """
        self.check_parallel(layout.tp, layout.pp, vpp=layout.vpp, ep=layout.ep, etp=layout.etp)
        width = layout.dp * layout.tp * layout.cp
        if width % (layout.ep * layout.etp):
            raise UserError(
                f"policy.ep={layout.ep} x policy.etp={layout.etp} does not divide dp x tp x cp = {width}, the ranks of "
                "a pipeline stage, over which experts are spread: lower policy.ep or raise policy.dp"
            )

    def check_parallel(
        self, tp: int, pp: int, prefix: str = "policy.", vpp: int = 1, ep: int = 1, etp: int = 1
    ) -> None:
        """Refuse a parallel size this model cannot be cut by; `vpp`: chunks of each pipeline stage.

        `prefix` makes the message's keys: a table of the run file ("rollout."), or "--" of a command.

        Raises:
            UserError: `tp` does not divide heads, kv_heads or ffn, `pp * vpp` does not divide num_layers, there are
                chunks of fewer than three stages, `ep` does not divide the experts or `etp` their width, or there are
                no experts.
        """
        for name in ("heads", "kv_heads", *(() if self.experts else ("ffn",))):
            self._check_divides(f"{prefix}tp", tp, name, getattr(self, name))
        if self.experts:
            self._check_divides(f"{prefix}ep", ep, "experts", self.experts.count)
            self._check_divides(f"{prefix}etp", etp, "expert_ffn", self.experts.ffn)
        elif ep > 1 or etp > 1:
            model = self.folder or f"the {self.family} model"
            raise UserError(f"{prefix}ep={ep}, {prefix}etp={etp}: {model} has no experts: set both to 1")
        self._check_divides(f"{prefix}pp", pp, "num_layers", self.num_layers)
        if vpp > 1 and pp < 3:
            # With two, a stage's neighbours are the same rank, and Megatron's messages to both sides get mixed up.
            raise UserError(f"{prefix}vpp={vpp} needs three pipeline stages or more, not {prefix}pp={pp}: set it to 1")
        if vpp > 1:
            self._check_divides(f"{prefix}vpp", vpp, f"num_layers/{prefix}pp", self.num_layers // pp)

    def _check_divides(self, key: str, parts: int, name: str, size: int) -> None:
        if parts < 1:
            raise UserError(f"{key}={parts} must be at least 1")
        if size % parts:
            model = self.folder or f"the {self.family} model"
            allowed = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
            raise UserError(f"{key}={parts} does not divide {name}={size} of {model}: choose from {allowed}")


Argument = float | int | str | bool | None | list[float | int | str | None]
Arguments = dict[str, Argument]

# Written into a run's checkpoint, by `record_arguments`.
ARGUMENTS_FILE = "arguments.json"

# Fields of Architecture that config.json calls otherwise; any other field keeps its name.
_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "qkv_bias": "attention_bias (query, key, value)",
    "qk_norm": "qk_norm",
}
_EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "normalised": "norm_topk_prob",
}
# The dtype is the weights' own matter, and the folder only serves messages.
_LEFT_OUT = ("dtype", "folder")


def model_arguments(arch: Architecture) -> Arguments:
    """Return all arguments of a model, flat, by config.json's names; rotary settings each by its own.

    What a model has none of is None, as an argument that an older version did not record; switches and experts, which
    came later, are left out where there are none.
    """
    found: Arguments = {}
    for each in dataclasses.fields(arch):
        value = getattr(arch, each.name)
        if each.name in _LEFT_OUT or value is each.default is False or value is each.default is None:
            continue
        if isinstance(value, RopeParameters):
            found |= {"rope_theta": value.theta, "rope_type": value.rope_type}
            for key, setting in value.scaling:
                found[f"rope_scaling.{key}"] = list(setting) if isinstance(setting, tuple) else setting
        elif isinstance(value, Experts):
            found |= {key: getattr(value, name) for name, key in _EXPERT_KEYS.items()}
        else:
            found[_KEYS.get(each.name, each.name)] = list(value) or None if isinstance(value, tuple) else value
    return found


def differences(one: Mapping[str, Argument], other: Mapping[str, Argument]) -> list[tuple[str, Argument, Argument]]:
    """Return (key, one's value, other's value) of every argument that differs.

    None stands for one that is not given, and so does an empty list. Windows come as config.json's `sliding_window`,
    once for each pair of sizes, with the layers that have it.
    """
    keys = [*one, *(key for key in other if key not in one)]
    pairs = [(key, _given(one.get(key)), _given(other.get(key))) for key in keys]
    return [
        found
        for key, mine, theirs in pairs
        if mine != theirs
        for found in (_windows(mine, theirs) if key == "windows" else [(key, mine, theirs)])
    ]


def _given(value: Argument) -> Argument:
    return None if value == [] else value


def _windows(mine: Argument, theirs: Argument) -> list[tuple[str, Argument, Argument]]:
    """The windows that differ, by pairs; layers that only one of the models has are left to their number's own key."""
    if not all(value is None or isinstance(value, list) for value in (mine, theirs)):
        return [("windows", mine, theirs)]
    sizes = [value for value in (mine, theirs) if isinstance(value, list)]
    layers = range(min(map(len, sizes)))
    pairs = [(_window(mine, layer), _window(theirs, layer)) for layer in layers]
    found = []
    for pair in dict.fromkeys(pairs):
        if pair[0] != pair[1]:
            # `layer_types` says which layers have a window, `sliding_window` of which size.
            keys = "sliding_window, layer_types" if None in pair else "sliding_window"
            where = _ranges([layer for layer in layers if pairs[layer] == pair])
            found.append((f"{keys} (layers {where})", *pair))
    return found


def _window(windows: Argument, layer: int) -> Argument:
    return windows[layer] if isinstance(windows, list) else None


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short, such as "0-3, 6, 8-9"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(parts)


def check_arguments(config: Path, arch: Architecture, folder: Path, recorded: Mapping[str, Argument]) -> None:
    """Compare a config.json with the arguments that were recorded beside the weights in `folder`.

    Raises:
        UserError: they differ; names every key with both values.
    """
    found = differences(model_arguments(arch), recorded)
    if found:
        keys = "; ".join(f"{key}={mine}, recorded {theirs}" for key, mine, theirs in found)
        raise UserError(f"{config} does not describe the weights in {folder}: {keys}: restore the model's own config")


def record_arguments(folder: Path, arch: Architecture) -> None:
    """Write the model's arguments into a run's checkpoint in `folder`."""
    text = json.dumps(model_arguments(arch), indent=1)
    (folder / ARGUMENTS_FILE).write_text(text + "\n", encoding="utf-8")


def read_arguments(folder: Path) -> Arguments | None:
    """Read the arguments that `record_arguments` wrote; None where it did not.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / ARGUMENTS_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {reason_at(error, path)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a table of the model's arguments")
    return found
