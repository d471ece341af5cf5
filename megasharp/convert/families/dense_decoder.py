"""The common part of Llama-like decoders: reading the config, and the rules that a family's table is made of."""

from __future__ import annotations

from transformers import PretrainedConfig

from megasharp.common.errors import UserError
from megasharp.convert.architecture import Architecture, Dimension, Experts, RopeParameters
from megasharp.convert.mapping import ColumnSplit, FusedQKV, GatedMLP, Replicated, RowSplit, Rule, VocabularySplit

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."

# Frequencies of the other types change with the sequence length; a training step has one fixed table.
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_PROJECTED: tuple[tuple[str, Dimension], ...] = (("q", "query_size"), ("k", "kv_size"))
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def _tied(arch: Architecture) -> bool:
    return arch.tied


def _untied(arch: Architecture) -> bool:
    return not arch.tied


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

VOCABULARY: tuple[Rule, ...] = (
    VocabularySplit("embedding.word_embeddings.weight", (EMBEDDING,), (("vocab", "hidden"),)),
    VocabularySplit("output_layer.weight", (HEAD,), (("vocab", "hidden"),), when=_untied),
    # A tied model's last pipeline stage holds its own copy of the embedding.
    VocabularySplit("output_layer.weight", (EMBEDDING,), (("vocab", "hidden"),), when=_tied, exported=False),
)

FINAL_NORM = Replicated("decoder.final_layernorm.weight", ("model.norm.weight",), (("hidden",),))

# Transformer Engine fuses a norm into the linear map behind it: the alias is the weight's name there.
NORMS: tuple[Rule, ...] = (
    Replicated(
        LAYER + "input_layernorm.weight",
        (HF_LAYER + "input_layernorm.weight",),
        (("hidden",),),
        aliases=(LAYER + "self_attention.linear_qkv.layer_norm_weight",),
    ),
    Replicated(
        LAYER + "pre_mlp_layernorm.weight",
        (HF_LAYER + "post_attention_layernorm.weight",),
        (("hidden",),),
        aliases=(LAYER + "mlp.linear_fc1.layer_norm_weight",),
    ),
    FINAL_NORM,
)

# Nothing is fused: no linear map follows them.
POST_NORMS: tuple[Rule, ...] = (
    Replicated(
        LAYER + "self_attn_bda.norm.weight",
        (HF_LAYER + "post_attention_layernorm.weight",),
        (("hidden",),),
    ),
    Replicated(
        LAYER + "mlp_bda.norm.weight",
        (HF_LAYER + "post_feedforward_layernorm.weight",),
        (("hidden",),),
    ),
    FINAL_NORM,
)

ATTENTION: tuple[Rule, ...] = (
    FusedQKV(
        LAYER + "self_attention.linear_qkv.weight",
        tuple(HF_LAYER + f"self_attn.{x}_proj.weight" for x in "qkv"),
        (("query_size", "hidden"), ("kv_size", "hidden"), ("kv_size", "hidden")),
    ),
    ColumnSplit(
        LAYER + "self_attention.linear_proj.weight",
        (HF_LAYER + "self_attn.o_proj.weight",),
        (("hidden", "query_size"),),
    ),
)

QKV_BIAS: tuple[Rule, ...] = (
    FusedQKV(
        LAYER + "self_attention.linear_qkv.bias",
        tuple(HF_LAYER + f"self_attn.{x}_proj.bias" for x in "qkv"),
        (("query_size",), ("kv_size",), ("kv_size",)),
    ),
)

QK_NORM: tuple[Rule, ...] = tuple(
    Replicated(
        LAYER + f"self_attention.{x}_layernorm.weight",
        (HF_LAYER + f"self_attn.{x}_norm.weight",),
        (("head_dim",),),
    )
    for x in "qk"
)

QK_NORM_WHOLE: tuple[Rule, ...] = tuple(
    RowSplit(
        LAYER + f"self_attention.{x}_norm.weight",
        (HF_LAYER + f"self_attn.{x}_norm.weight",),
        ((size,),),
    )
    for x, size in _PROJECTED
)

GATED_MLP: tuple[Rule, ...] = (
    GatedMLP(
        LAYER + "mlp.linear_fc1.weight",
        (HF_LAYER + "mlp.gate_proj.weight", HF_LAYER + "mlp.up_proj.weight"),
        (("ffn", "hidden"), ("ffn", "hidden")),
    ),
    ColumnSplit(
        LAYER + "mlp.linear_fc2.weight",
        (HF_LAYER + "mlp.down_proj.weight",),
        (("hidden", "ffn"),),
    ),
)


def read_decoder(
    config: PretrainedConfig,
    family: str,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] = (),
    experts: Experts | None = None,
    qk_norm_whole: bool = False,
    post_norm: bool = False,
) -> Architecture:
    """Read the Architecture of a Llama-like config; `windows` and `experts` as the family reads them.

    Raises:
        UserError: the config asks for something these decoders are not built with here.
    """
    _check_supported(config)
    if any(window is not None and window < 1 for window in windows):
        raise refuse(config, "sliding_window", config.sliding_window, "at least 1, or null")
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    return Architecture(
        family=family,
        num_layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        ffn=int(config.intermediate_size),
        vocab=int(config.vocab_size),
        norm_eps=float(config.rms_norm_eps),
        rope_parameters=_rope(config),
        max_positions=int(config.max_position_embeddings),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        dtype=_dtype_name(config),
        windows=windows if any(windows) else (),
        experts=experts,
        folder=str(config.name_or_path),
        qk_norm_whole=qk_norm_whole,
        post_norm=post_norm,
    )


def windows_by_layer(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Read the windows of a config that names each layer's kind in `layer_types`.

    Raises:
        UserError: a kind of attention that is not built, or no size for the windows.
    """
    kinds: list[str] = config.layer_types
    unknown = sorted(set(kinds) - set(_LAYER_TYPES))
    if unknown:
        raise refuse(config, "layer_types", unknown, ", ".join(_LAYER_TYPES))
    windowed = "sliding_attention" in kinds
    if windowed and getattr(config, "use_sliding_window", None) is False:
        supported = "true, or layer_types without sliding_attention"
        raise refuse(config, "use_sliding_window", "false with sliding_attention in layer_types", supported)
    if windowed and config.sliding_window is None:
        raise refuse(config, "sliding_window", None, "a number of positions where layer_types has sliding_attention")
    return tuple(int(config.sliding_window) if kind == "sliding_attention" else None for kind in kinds)


def refuse(config: PretrainedConfig, key: str, value: object, supported: str) -> UserError:
    """Make the error for a value of config.json that is not supported here."""
    path = f"{config.name_or_path}/config.json"
    return UserError(f"{path}: {key}={value} is not supported (supported: {supported})")


def _check_supported(config: PretrainedConfig) -> None:
    if config.hidden_act != "silu":
        raise refuse(config, "hidden_act", config.hidden_act, "silu")
    if config.num_attention_heads % config.num_key_value_heads:
        supported = f"a divisor of num_attention_heads={config.num_attention_heads}"
        raise refuse(config, "num_key_value_heads", config.num_key_value_heads, supported)


def _rope(config: PretrainedConfig) -> RopeParameters:
    settings = dict(config.rope_parameters)
    theta, rope_type = settings.pop("rope_theta"), settings.pop("rope_type")
    settings.pop("type", None)
    if theta is None:
        raise refuse(config, "rope_theta", None, "a number")
    partial = settings.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise refuse(config, "partial_rotary_factor", partial, "1.0")
    if rope_type not in _ROPE_TYPES:
        raise refuse(config, "rope_type", rope_type, ", ".join(_ROPE_TYPES))
    scaling = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    return RopeParameters(float(theta), rope_type, tuple(sorted(scaling.items())))


def _dtype_name(config: PretrainedConfig) -> str:
    name = "float32" if config.dtype is None else str(config.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise refuse(config, "dtype", name, ", ".join(_DTYPES))
    return name
