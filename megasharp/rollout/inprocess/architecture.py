"""What the decoder must know of a Hugging Face checkpoint folder: family, sizes and rotary frequencies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megasharp.errors import UserError, one_line

# Types whose frequencies do not depend on the sequence's length below `max_position_embeddings`,
# which is as far as the engine goes.
FIXED_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class Family:
    """Where the supported families differ: Qwen3 norms queries and keys, Qwen2 has a bias on q, k, v."""

    query_key_norm: bool
    qkv_bias: bool
    output_bias: bool


@dataclass(frozen=True, slots=True, eq=False)
class Architecture:
    """Sizes of one decoder-only model. `inverse_frequencies`: float32 [head_dim / 2]."""

    family: Family
    vocabulary: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    max_positions: int
    tied: bool
    inverse_frequencies: Tensor
    rotary_scale: float


def read_architecture(folder: Path) -> Architecture:
    """Read `folder`/config.json. Raises UserError for a missing, broken or unsupported one."""
    name = _architecture_name(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise UserError(f"{folder / 'config.json'}: not a usable model config: {one_line(error)}") from error
    family = _family(folder, name, config)
    _refuse_unsupported(folder, config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inverse_frequencies, rotary_scale = _rotary(folder, config, head_dim)
    return Architecture(
        family=family,
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        feed_forward=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_epsilon=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
        inverse_frequencies=inverse_frequencies,
        rotary_scale=rotary_scale,
    )


def _architecture_name(folder: Path) -> str:
    path = folder / "config.json"
    try:
        names = json.loads(path.read_text(encoding="utf-8")).get("architectures") or ["none named"]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); give a Hugging Face folder") from error
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a JSON object ({one_line(error)})") from error
    return str(names[0])


def _family(folder: Path, name: str, config: AutoConfig) -> Family:
    if name == "Qwen3ForCausalLM":
        bias = bool(config.attention_bias)
        return Family(query_key_norm=True, qkv_bias=bias, output_bias=bias)
    if name == "Qwen2ForCausalLM":
        return Family(query_key_norm=False, qkv_bias=True, output_bias=False)
    raise UserError(
        f"{folder / 'config.json'}: architecture {name} is not served by the in-process engine; "
        "use Qwen3ForCausalLM or Qwen2ForCausalLM"
    )


def _refuse_unsupported(folder: Path, config: AutoConfig) -> None:
    if config.hidden_act != "silu":
        raise UserError(f"{folder / 'config.json'}: hidden_act {config.hidden_act} is not served; use silu")
    if any(kind != "full_attention" for kind in config.layer_types):
        raise UserError(
            f"{folder / 'config.json'}: sliding-window layers are not served; set use_sliding_window to false"
        )


def _rotary(folder: Path, config: AutoConfig, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies as transformers computes them; 'default' (arXiv:2104.09864) has no entry in its table."""
    kind = config.rope_parameters["rope_type"]
    if kind not in FIXED_ROPE_TYPES:
        raise UserError(
            f"{folder / 'config.json'}: rope_type {kind} is not served; use one of {', '.join(FIXED_ROPE_TYPES)}"
        )
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config)
    if frequencies.numel() * 2 != head_dim:
        raise UserError(f"{folder / 'config.json'}: a partial rotary embedding is not served")
    return frequencies.float(), float(scale)
