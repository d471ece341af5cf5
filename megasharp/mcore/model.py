"""One rank's part of a GPTModel, built from an architecture read from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import get_type_hints

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
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from megasharp.convert.architecture import Architecture, RopeParameters
from megasharp.convert.lora import LoraSettings, Target
from megasharp.convert.mapping import padded_vocab
from megasharp.errors import UserError
from megasharp.mcore.attention import PackedAttention
from megasharp.mcore.lora import ADAPTED, attach
from megasharp.mcore.norm import RMSNorm
from megasharp.mcore.parallel import Place
from megasharp.types import ParallelLayout

Options = Mapping[str, int | float | bool | str | None]

# Only the names of the settings are asked of it.
_ANY_ARCHITECTURE = Architecture(
    family="", num_layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=1, norm_eps=1.0,
    rope_parameters=RopeParameters(1.0), max_positions=1, tied=False, qkv_bias=False, qk_norm=False, dtype="float32",
)  # fmt: skip

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


# What megasharp sets itself, from the checkpoint, the layout and the run's own keys; and what would need another model.
_OWN_DDP = {"use_distributed_optimizer", "grad_reduce_in_fp32"}
_OWN_OPTIMIZER = {
    "optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad",
    "use_distributed_optimizer", "bf16", "fp16", "params_dtype",
}  # fmt: skip
_OTHER_MODELS = ("moe_", "num_moe", "mtp_", "multi_latent", "experimental_attention")


def sort_options(options: Options) -> PassThrough:
    """Assign each key to Megatron's own configurations.

    Raises UserError for a key that the installed version lacks, that megasharp sets itself, or that asks for another
    model, and for a value of another type than the installed version declares.
    """
    known = {room: {f.name for f in fields(config)} for room, config in PASS_THROUGH.items()}
    for key, value in options.items():
        rooms = [room for room, names in known.items() if key in names]
        if not rooms:
            raise UserError(f"policy.megatron.{key}: the installed megatron-core has no such option")
        if key in _OWN_DDP | _OWN_OPTIMIZER | _own_model_settings():
            raise UserError(f"policy.megatron.{key}: megasharp sets this itself, from the checkpoint or the run's keys")
        if key.startswith(_OTHER_MODELS):
            raise UserError(f"policy.megatron.{key}: this would be another model than the checkpoint's")
        for room in rooms:
            _check_type(key, value, PASS_THROUGH[room])
    return PassThrough(**{room: {k: v for k, v in options.items() if k in names} for room, names in known.items()})


def _own_model_settings() -> set[str]:
    return {*_settings(_ANY_ARCHITECTURE, ParallelLayout(), torch.float32, "full"), "deterministic_mode"}


def _check_type(key: str, value: object, config: type) -> None:
    try:
        adapter: TypeAdapter[object] = TypeAdapter(get_type_hints(config)[key])
    except (NameError, PydanticSchemaGenerationError, PydanticUserError):
        # Some of Megatron's fields have types that only Megatron can check.
        return
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise UserError(f"policy.megatron.{key}: {reason} (found {value!r})") from None


def transformer_config(
    arch: Architecture,
    layout: ParallelLayout,
    dtype: torch.dtype,
    recompute: str,
    options: Options,
    deterministic: bool = False,
) -> TransformerConfig:
    """Megatron's configuration of this architecture; `options` are the model's part of `sort_options`."""
    own = _settings(arch, layout, dtype, recompute)
    return TransformerConfig(**own, **options, deterministic_mode=deterministic)


def _settings(arch: Architecture, layout: ParallelLayout, dtype: torch.dtype, recompute: str) -> dict[str, object]:
    """What megasharp itself decides of the model's configuration.

    Losses come with global denominators, so Megatron must neither average over micro-batches nor over data-parallel
    ranks: that is what `calculate_per_token_loss` means to its schedules.
    """
    return {
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
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
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


def _recompute_settings(recompute: str) -> dict[str, object]:
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if recompute == "selective" else {}


def _layers(
    config: TransformerConfig, arch: Architecture, chunk: int | None, adapted: Sequence[Target]
) -> TransformerBlockSubmodules:
    """Megatron's local layer spec with our norm, our packed core attention, and room for adapters."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = ModuleSpec(module=PackedAttention, params={"windows": arch.windows})
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    for target in adapted:
        home = attention if target in ("qkv", "proj") else _linear_maps(parts.mlp)
        setattr(home, f"linear_{target}", ADAPTED[target])
    count = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)


def _linear_maps(mlp: ModuleSpec | partial[object]) -> object:
    """The classes of an MLP's linear maps; megatron-core 0.19 has a function with its arguments as an MLP's spec."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def build_chunks(
    config: TransformerConfig, arch: Architecture, place: Place, lora: LoraSettings | None = None, seed: int = 0
) -> list[GPTModel]:
    """This rank's part, weights not yet filled: one chunk of layers, or as many as there are virtual stages.

    With `lora` only the adapters want gradients; `seed` is that of their initial values.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    adapted = lora.targets if lora else ()
    chunks = [_build_chunk(config, arch, place, chunk, adapted) for chunk in (range(virtual) if virtual else [None])]
    if lora is not None:
        for chunk in chunks:
            attach(chunk, lora, arch, place, seed)
    return chunks


def _build_chunk(
    config: TransformerConfig, arch: Architecture, place: Place, chunk: int | None, adapted: Sequence[Target]
) -> GPTModel:
    """Positions are rotated in the core attention, not by GPTModel."""
    last = None if chunk is None else config.virtual_pipeline_model_parallel_size - 1
    model = GPTModel(
        config,
        _layers(config, arch, chunk, adapted),
        vocab_size=padded_vocab(arch.vocab, config.tensor_model_parallel_size),
        max_sequence_length=arch.max_positions,
        pre_process=place.first_stage and chunk in (None, 0),
        post_process=place.last_stage and chunk == last,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="none",
        vp_stage=chunk,
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
        dimension = next((d for kind, d in dimensions.items() if isinstance(module, kind)), None)
        if dimension is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dimension, 1)
