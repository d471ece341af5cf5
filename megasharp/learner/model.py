"""One rank's part of a GPTModel, built from an architecture read from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import get_type_hints

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from megasharp.common.errors import UserError
from megasharp.common.layout import ParallelLayout
from megasharp.config.mistakes import shown
from megasharp.config.policy import ExpertsConfig, LoraConfig, PolicyConfig
from megasharp.convert.architecture import Architecture, Experts, RopeParameters
from megasharp.convert.families.family import is_of_expert
from megasharp.convert.mapping import padded_vocab
from megasharp.learner.adapters import attach
from megasharp.learner.layer_spec import layers, local_name
from megasharp.learner.parallel import Place
from megasharp.learner.routers import route_without_transformer_engine

Options = Mapping[str, int | float | bool | str | None]

# Serves to list the names of the settings; its values are not used.
_ANY_ARCHITECTURE = Architecture(
    family="", num_layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=1, norm_eps=1.0,
    rope_parameters=RopeParameters(1.0), max_positions=1, tied=False, qkv_bias=False, qk_norm=False, dtype="float32",
    experts=Experts(2, 2, 1, True),
)  # fmt: skip

# The configurations to which a key of `policy.megatron` may belong.
PASS_THROUGH = {
    "model": TransformerConfig,
    "ddp": DistributedDataParallelConfig,
    "optimizer": MegatronOptimizerConfig,
}


@dataclass(frozen=True, slots=True)
class PassThrough:
    """`policy.megatron`, sorted by the Megatron configuration that each key belongs to."""

    model: Options
    ddp: Options
    optimizer: Options


# Keys that megasharp sets itself, from the checkpoint, the layout and the run's own keys.
_OWN_DDP = {"use_distributed_optimizer", "grad_reduce_in_fp32"}
_OWN_OPTIMIZER = {
    "optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad",
    "use_distributed_optimizer", "bf16", "fp16", "params_dtype",
}  # fmt: skip
# No form of graphs that Megatron has replays micro-batches of several shapes (decision 62).
_NO_GRAPHS = "packed micro-batches have no fixed shape that a graph could replay; leave it out"
# Megatron's keys that have one of ours in their place, or none.
_INSTEAD = {
    "overlap_grad_reduce": "set policy.overlap",
    "overlap_param_gather": "set policy.overlap",
    "optimizer_cpu_offload": "set policy.optimizer_offload",
    "optimizer_offload_fraction": "set policy.optimizer_offload, which holds all of it on the host",
    "recompute_modules": "set policy.recompute_modules",
    "recompute_granularity": "set policy.recompute",
    "recompute_method": "set policy.recompute",
    "recompute_num_layers": "set policy.recompute",
    "tensor_model_parallel_size": "set policy.tp",
    "pipeline_model_parallel_size": "set policy.pp",
    "virtual_pipeline_model_parallel_size": "set policy.vpp",
    "context_parallel_size": "set policy.cp",
    "expert_model_parallel_size": "set policy.ep",
    "expert_tensor_parallel_size": "set policy.etp",
    "moe_token_dispatcher_type": "set policy.experts.dispatcher",
    "moe_aux_loss_coeff": "set policy.experts.balance_loss",
    "moe_router_load_balancing_type": "set policy.experts.balance_loss",
    "moe_enable_routing_replay": "set policy.experts.replay",
    "fp8": "set policy.fp8",
    "fp8_recipe": "set policy.fp8_recipe",
    "deterministic_mode": "set deterministic",
    "lr": "set policy.optimizer.lr",
    "weight_decay": "set policy.optimizer.weight_decay",
    "clip_grad": "set policy.optimizer.clip_grad",
    "bf16": "set model.dtype",
    "fp16": "set model.dtype",
    "params_dtype": "set model.dtype",
}
# Keys whose schedules run layers in pieces, past the hooks by which routers are counted and told their experts.
_PAST_HOOKS = {"overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release"}
# Keys that make a mixture of experts faster and leave it the same.
_FASTER_EXPERTS = {"moe_permute_fusion", "moe_deepep_num_sms"}
# Beginnings of keys that would need another model.
_OTHER_MODELS = (
    "moe_", "num_moe", "mtp_", "multi_latent", "experimental_attention", "dsa_", "linear_", "mamba_", "is_hybrid_model",
    "heterogeneous_block_specs", "softmax_scale", "softmax_type", "window_", "qk_l2_norm", "attention_output_gate",
    "rotary_interleaved", "no_rope_freq", "mrope_section", "glu_linear_offset", "activation_func_clamp_value",
    "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm",
)  # fmt: skip


def sort_options(options: Options) -> PassThrough:
    """Assign each key to Megatron's own configurations.

    Raises UserError for a key that the installed version lacks, that megasharp sets itself, or that asks for another
    model, and for a value of another type than the installed version declares.
    """
    known = {part: {f.name for f in fields(config)} for part, config in PASS_THROUGH.items()}
    # A policy with which every setting of megasharp's own appears; only names are read of the others.
    every = PolicyConfig(recompute="full", fp8="hybrid")
    own_model = {*_settings(_ANY_ARCHITECTURE, ParallelLayout(), torch.float32, every), "deterministic_mode"}
    for key, value in options.items():
        parts = [part for part, names in known.items() if key in names]
        if not parts:
            raise UserError(f"policy.megatron.{key}: the installed megatron-core has no such option")
        if "cuda_graph" in key:
            raise UserError(f"policy.megatron.{key}: {_NO_GRAPHS}")
        if key in _PAST_HOOKS:
            raise UserError(
                f"policy.megatron.{key}: its schedule runs layers in pieces, past their hooks; leave it out"
            )
        if key in _INSTEAD:
            raise UserError(f"policy.megatron.{key}: {_INSTEAD[key]}")
        if key.startswith(_OTHER_MODELS) and key not in _FASTER_EXPERTS:
            raise UserError(f"policy.megatron.{key}: this would be another model than the checkpoint's")
        if key in _OWN_DDP | _OWN_OPTIMIZER | own_model:
            raise UserError(f"policy.megatron.{key}: megasharp sets this itself, from the checkpoint or the run's keys")
        for part in parts:
            _check_type(key, value, PASS_THROUGH[part])
    return PassThrough(**{part: {k: v for k, v in options.items() if k in names} for part, names in known.items()})


def _check_type(key: str, value: object, config: type) -> None:
    try:
        adapter: TypeAdapter[object] = TypeAdapter(get_type_hints(config)[key])
    except (NameError, PydanticSchemaGenerationError, PydanticUserError):
        # Only Megatron itself can check the types of some of its fields.
        return
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        hint = get_type_hints(config)[key]
        expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        raise UserError(f"policy.megatron.{key}: Megatron-core expects {expected}, found {shown(value)}") from None


def transformer_config(
    arch: Architecture,
    layout: ParallelLayout,
    dtype: torch.dtype,
    policy: PolicyConfig,
    options: Options,
    deterministic: bool = False,
) -> TransformerConfig:
    """Return Megatron's configuration of this architecture; `options` are the model's part of `sort_options`.

    Of `policy` it reads `recompute`, `recompute_modules`, `fp8`, `fp8_recipe` and `experts`.
    """
    own = _settings(arch, layout, dtype, policy)
    return TransformerConfig(**own, **options, deterministic_mode=deterministic)


# Settings that are the same for every model, layout and run.
_ALWAYS: dict[str, object] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Megatron refuses variable lengths with the default, in dense models too.
    "moe_token_dispatcher_type": "alltoall",
    # Losses come with global denominators, so Megatron must neither average over micro-batches nor over data-parallel
    # ranks: its schedules take this key to mean that.
    "calculate_per_token_loss": True,
    # Weights are filled from a folder.
    "perform_initialization": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    # Megatron's own output layer, which either spec has, refuses it without apex's kernel: `fuse_gradient_sums`.
    "gradient_accumulation_fusion": False,
}


def _settings(
    arch: Architecture, layout: ParallelLayout, dtype: torch.dtype, policy: PolicyConfig
) -> dict[str, object]:
    """Return the part of the model's configuration that megasharp itself decides."""
    with_cuda = torch.cuda.is_available()
    settings = {
        **_ALWAYS,
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn,
        "layernorm_epsilon": arch.norm_eps,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.tp > 1,
        "variable_seq_lengths": layout.pp > 1,
        "use_cpu_initialization": not with_cuda,
        # SwiGLU in one kernel of torch.compile's, which keeps its input alone. On a CPU that would not pay: there the
        # MLP calls the activation that the layer spec names (`layer_spec.SwiGLU`), of whatever layers it is.
        "bias_activation_fusion": with_cuda,
        "use_te_activation_func": not with_cuda,
    }
    if policy.recompute == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if policy.recompute == "selective":
        # Megatron may add to the list that it is given.
        modules = ["moe" if arch.experts and name == "mlp" else name for name in policy.recompute_modules]
        settings |= {"recompute_granularity": "selective", "recompute_modules": modules}
    if policy.fp8 is not None:
        # Both recipes scale by present values: delayed scaling's history would be in no checkpoint.
        settings |= {"fp8": policy.fp8, "fp8_recipe": policy.fp8_recipe}
    if arch.experts is not None:
        settings |= _experts_settings(arch.experts, layout, policy.experts)
    return settings


# Megatron's names of dispatchers.
_DISPATCHERS = {"alltoall": "alltoall", "allgather": "allgather", "deepep": "flex"}


def _experts_settings(experts: Experts, layout: ParallelLayout, config: ExpertsConfig) -> dict[str, object]:
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_topk": experts.per_token,
        # After a softmax over all experts the chosen ones' weights do not add up to 1.
        "moe_router_pre_softmax": not experts.normalised,
        # Sums in bfloat16 would choose other experts than sums in another order.
        "moe_router_dtype": "fp32",
        # `learner.routers` has a load-balancing loss.
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": _DISPATCHERS[config.dispatcher],
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def build_chunks(
    config: TransformerConfig,
    arch: Architecture,
    place: Place,
    lora: LoraConfig | None = None,
    seed: int = 0,
    transformer_engine: bool = False,
    engine_attention: bool = False,
) -> list[GPTModel]:
    """Build this rank's part, weights not yet filled: one chunk of layers, or one per virtual stage.

    With `lora` only the adapters require gradients; `seed` is that of their initial values. `transformer_engine`: take
    its modules instead of Megatron's own; `engine_attention`: take its attention.
    """
    if arch.experts is not None:
        route_without_transformer_engine()
        # Megatron has grouped experts of Transformer Engine's only.
        config.moe_grouped_gemm = transformer_engine
    virtual = config.virtual_pipeline_model_parallel_size
    adapted = lora.targets if lora else ()
    numbers = range(virtual) if virtual else [None]
    spec = partial(
        layers,
        adapted=adapted,
        transformer_engine=transformer_engine,
        engine_attention=engine_attention,
        post_norm=arch.post_norm,
        qk_norm_whole=arch.qk_norm_whole,
    )
    chunks = [_build_chunk(config, arch, place, number, spec) for number in numbers]
    if lora is not None:
        for chunk in chunks:
            attach(chunk, lora, arch, place, seed)
    return chunks


def _build_chunk(
    config: TransformerConfig,
    arch: Architecture,
    place: Place,
    chunk: int | None,
    spec: Callable[[TransformerConfig, tuple[int | None, ...], int | None], TransformerBlockSubmodules],
) -> GPTModel:
    last = None if chunk is None else config.virtual_pipeline_model_parallel_size - 1
    model = GPTModel(
        config,
        spec(config, arch.windows, chunk),
        vocab_size=padded_vocab(arch.vocab, config.tensor_model_parallel_size),
        max_sequence_length=arch.max_positions,
        pre_process=place.first_stage and chunk in (None, 0),
        post_process=place.last_stage and chunk == last,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        # Positions are rotated in our core attention, not by GPTModel.
        position_embedding_type="none",
        vp_stage=chunk,
    )
    # Megatron 0.16 marks weights as split over tensor-parallel ranks only while it initialises them, which is left out
    # here. Without the mark it takes them for copies and counts only the first rank's in the gradient norm.
    dimensions = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        dimension = next((d for kind, d in dimensions.items() if isinstance(module, kind)), None)
        if dimension is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dimension, 1)
    for name, parameter in model.named_parameters():
        if is_of_expert(local_name(name)):
            # Megatron leaves out this mark where ep is 1. But tensor-parallel ranks have each seen other tokens then.
            parameter.allreduce = False
            # Transformer Engine's grouped experts have none of these marks, and ranks have each other experts.
            if not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, 0 if "linear_fc1" in name else 1, 1)
    return model
