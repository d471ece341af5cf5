"""The sizes and switches of a decoder, as both Hugging Face's and Megatron's builders need them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megasharp.common.errors import UserError

Dimension = Literal["vocab", "hidden", "head_dim", "query_size", "kv_size", "ffn"]
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
class Architecture:
    """One decoder. `vocab` is the real vocabulary size (no padding), `dtype` a torch name such as "bfloat16".

    `windows`: how many positions a query of each layer sees, its own included; None where it sees all before it. Empty
    where no layer has a window.
    `folder` is where it was read, for error messages only: it takes no part in comparisons.
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

    @property
    def query_size(self) -> int:
        """Rows of the query projection: heads * head_dim, which need not equal `hidden`."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """How many positions a query of `layer` (from 0) sees, its own included; None where it sees all before it."""
        return self.windows[layer] if self.windows else None

    @property
    def smallest_window(self) -> int | None:
        """The fewest positions that some layer sees; None where no layer has a window."""
        return min((window for window in self.windows if window is not None), default=None)

    def shape(self, dimensions: tuple[Dimension, ...]) -> tuple[int, ...]:
        """Numbers for a symbolic shape, for instance ("vocab", "hidden")."""
        sizes: dict[Dimension, int] = {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "head_dim": self.head_dim,
            "query_size": self.query_size,
            "kv_size": self.kv_size,
            "ffn": self.ffn,
        }
        return tuple(sizes[dimension] for dimension in dimensions)

    def parameter_count(self) -> int:
        """Number of weights; a tied head counts once."""
        projected = self.query_size + 2 * self.kv_size
        attention = self.hidden * (projected + self.query_size)
        bias = projected if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + bias + norms + 3 * self.hidden * self.ffn
        vocabulary = self.vocab * self.hidden * (1 if self.tied else 2)
        return vocabulary + self.num_layers * layer + self.hidden

    def check_parallel(self, tp: int, pp: int, prefix: str = "policy.", vpp: int = 1) -> None:
        """Refuse a tensor- or pipeline-parallel size this model cannot be cut by; `vpp`: chunks of each stage.

        `prefix` makes the message's keys: a table of the run file ("rollout."), or "--" of a command.

        Raises:
            UserError: `tp` does not divide heads, kv_heads or ffn, `pp * vpp` does not divide num_layers, or there are
                chunks of fewer than three stages.
        """
        for name in ("heads", "kv_heads", "ffn"):
            self._check_divides(f"{prefix}tp", tp, name, getattr(self, name))
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
