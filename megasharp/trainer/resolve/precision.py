"""The precision of linear layers: the keys of FP8, Transformer Engine and recomputation that are refused."""

from __future__ import annotations

from megasharp.common.errors import UserError
from megasharp.config.run_config import RunConfig
from megasharp.convert.architecture import Architecture
from megasharp.trainer.resolve.devices import device_of

# Transformer Engine multiplies matrices in FP8 whose dimensions are multiples of this.
_FP8_MULTIPLE = 16


def check_precision_keys(config: RunConfig, architecture: Architecture, where: str) -> None:
    """Raise UserError, in one line, for keys without effect, and for what this model or the run's device cannot do.

    Says nothing of the machine that this runs on.
    """
    policy, fields = config.policy, type(config.policy).model_fields
    if policy.fp8 is None and policy.fp8_recipe != fields["fp8_recipe"].default:
        raise UserError(f"{where}: policy.fp8_recipe has no effect while policy.fp8 is null; set policy.fp8 too")
    if policy.recompute != "selective" and policy.recompute_modules != fields["recompute_modules"].default:
        raise UserError(
            f"{where}: policy.recompute_modules has no effect with policy.recompute={policy.recompute}; set "
            "policy.recompute=selective too"
        )
    if len(set(policy.recompute_modules)) < len(policy.recompute_modules):
        raise UserError(f"{where}: policy.recompute_modules names one twice")
    if policy.recompute == "selective" and not policy.recompute_modules:
        raise UserError(f"{where}: policy.recompute_modules is empty; name one, or set policy.recompute=none")
    if policy.fp8 is not None:
        _check_fp8(config, architecture, f"{where}: policy.fp8={policy.fp8}")
    elif policy.transformer_engine is True and device_of(config) != "cuda":
        raise UserError(f"{where}: policy.transformer_engine=true needs a GPU; on a CPU leave it at auto, or set false")


def check_precision(config: RunConfig, architecture: Architecture, where: str) -> None:
    """Raise UserError as `check_precision_keys`, and where this Python lacks Transformer Engine."""
    policy = config.policy
    check_precision_keys(config, architecture, where)
    if policy.fp8 is not None or policy.transformer_engine is True:
        # Imported here: Megatron takes seconds to import.
        from megasharp.learner.layer_spec import require_transformer_engine

        key = "transformer_engine=true" if policy.fp8 is None else f"fp8={policy.fp8}"
        remedy = "leave policy.transformer_engine at auto" if policy.fp8 is None else "leave policy.fp8 null"
        require_transformer_engine(f"{where}: policy.{key}", remedy)


def _check_fp8(config: RunConfig, architecture: Architecture, key: str) -> None:
    policy = config.policy
    if policy.transformer_engine is False:
        raise UserError(f"{key}: Transformer Engine does it, which policy.transformer_engine=false leaves out")
    if config.model.dtype != "bfloat16":
        raise UserError(f"{key} rounds products of bfloat16 weights; set model.dtype=bfloat16")
    if device_of(config) != "cuda":
        raise UserError(f"{key} needs a GPU (Hopper or later); leave it null on a CPU")
    joined = architecture.query_size + 2 * architecture.kv_size
    sizes = {"hidden": architecture.hidden, "query, key and value": joined, "ffn": architecture.ffn}
    for name, size in sizes.items():
        if size % (policy.tp * _FP8_MULTIPLE):
            model = architecture.folder or config.model.path
            raise UserError(
                f"{key}: the {name} size {size} of {model} over tp {policy.tp} is no multiple of {_FP8_MULTIPLE}; "
                "lower policy.tp or leave policy.fp8 null"
            )
