"""One rank's part of a GPTModel, built from an architecture read from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from megasharp.convert.architecture import Architecture
from megasharp.convert.mapping import padded_vocab
from megasharp.errors import UserError
from megasharp.mcore.attention import PackedAttention
from megasharp.mcore.norm import RMSNorm
from megasharp.mcore.parallel import Place
from megasharp.types import ParallelLayout

Options = Mapping[str, int | float | bool | str | None]

# Where a pass-through key of `policy.megatron` may belong.
PASS_THROUGH = {
    "model": TransformerConfig,
    "ddp": DistributedDataParallelConfig,
    "optimizer": MegatronOptimizerConfig,
}


@dataclass(frozen=True, slots=True)
class PassThrough:
    """`policy.megatron`, sorted by the Megatron configuration each key belongs to."""

    model: Options
    ddp: Options
    optimizer: Options


def sort_options(options: Options) -> PassThrough:
    """Assign each key to Megatron's own configurations. Raises UserError for one the installed version lacks."""
    known = {room: {f.name for f in fields(config)} for room, config in PASS_THROUGH.items()}
    for key in options:
        if not any(key in names for names in known.values()):
            raise UserError(f"policy.megatron.{key}: the installed megatron-core has no such option")
    return PassThrough(**{room: {k: v for k, v in options.items() if k in names} for room, names in known.items()})


def transformer_config(
    arch: Architecture, layout: ParallelLayout, dtype: torch.dtype, recompute: str, options: Options
) -> TransformerConfig:
    """Megatron's configuration of this architecture.

    Losses come with global denominators, so Megatron must neither average over micro-batches nor over data-parallel
    ranks: that is what `calculate_per_token_loss` means to its schedules.
    """
    settings: dict[str, object] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.tp > 1,
        "variable_seq_lengths": layout.pp > 1,
        # Megatron refuses variable lengths with the default, in dense models too.
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        **_recompute_settings(recompute),
    }
    overlap = sorted(settings.keys() & options.keys())
    if overlap:
        raise UserError(f"policy.megatron.{overlap[0]}: megasharp sets this from the checkpoint and the layout")
    return TransformerConfig(**settings, **options)


def _recompute_settings(recompute: str) -> dict[str, object]:
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if recompute == "selective" else {}


def _layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layer spec with our norm and our packed core attention."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)


def build_model(config: TransformerConfig, arch: Architecture, place: Place) -> GPTModel:
    """This rank's part, weights not yet filled. Positions are rotated in the core attention, not by GPTModel."""
    model = GPTModel(
        config,
        _layers(config),
        vocab_size=padded_vocab(arch.vocab, config.tensor_model_parallel_size),
        max_sequence_length=arch.max_positions,
        pre_process=place.first_stage,
        post_process=place.last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="none",
    )
    _mark_split_weights(model)
    return model


def _mark_split_weights(model: GPTModel) -> None:
    """Say which weights are split over tensor-parallel ranks, and how.

    Megatron 0.16 marks weights only while it initialises them, which is left out here; without the mark it takes
    them for copies and counts the first rank's alone in the gradient norm.
    """
    dimensions = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module) in dimensions and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dimensions[type(module)], 1)
