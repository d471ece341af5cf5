"""Which memory network fits which policy in one engine; the reason where one does not. Imports no sglang.

Configs are those of transformers, or anything with the same attributes.
"""

from __future__ import annotations

from typing import Any

from megasharp.errors import UserError

COMPOSITES = {"Qwen2ForCausalLM": "Qwen2WithMemory", "Qwen3ForCausalLM": "Qwen3WithMemory"}
# What each attention back-end asks of the memory's query heads beside the policy's.
_ANY, _NOT_MORE, _EQUAL = "any number of", "not more", "as many"
ATTENTION_KEYS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_BACKENDS = {"torch_native": _ANY, "fa3": _ANY, "triton": _NOT_MORE, "flashinfer": _EQUAL}


def check_pair(policy: Any, memory: Any, tp: int) -> None:
    """Raises UserError with the reason why `memory` cannot share an engine of `tp` ranks with `policy`."""
    for whose, config in (("policy", policy), ("memory network", memory)):
        _check_network(whose, config, tp)
    if memory.vocab_size != policy.vocab_size:
        raise UserError(
            f"the memory network has a vocabulary of {memory.vocab_size}, the policy of {policy.vocab_size}; "
            "they must share one"
        )
    if _head_size(memory) != _head_size(policy):
        raise UserError(
            f"the memory network has heads of size {_head_size(memory)}, the policy of {_head_size(policy)}; "
            "they must be equal, because both networks share one cache"
        )
    kv_repeats(policy, memory, tp)


def kv_repeats(policy: Any, memory: Any, tp: int) -> int:
    """How often each of the memory's key-value heads stands in the pool of one rank.

    Raises UserError where copies of its heads cannot fill the policy's.
    """
    ours, theirs = (max(1, int(config.num_key_value_heads) // tp) for config in (policy, memory))
    queries: int = memory.num_attention_heads // tp
    where = f"(per rank, tp={tp}) " if tp > 1 else ""
    if ours % theirs:
        raise UserError(
            f"the memory network has {theirs} key-value heads {where}and the policy {ours}; "
            "the policy's must be a multiple of the memory's, because they share one cache"
        )
    if (queries // theirs) % (ours // theirs):
        raise UserError(
            f"the memory network's {queries} query heads {where}on {theirs} key-value heads cannot be shared among the "
            f"policy's {ours}; take a memory network with {ours} key-value heads"
        )
    return ours // theirs


def check_attention(kernels: Any, policy: Any, memory: Any) -> None:
    """Raises UserError where SGLang's attention back-end plans with the policy's heads in a way that the memory breaks.

    `kernels` has each of `ATTENTION_KEYS`; None where SGLang has not chosen yet, or another one counts.
    """
    ours, theirs = policy.num_attention_heads, memory.num_attention_heads
    for name in ATTENTION_KEYS:
        backend = getattr(kernels, name)
        if backend is None:
            continue
        rule = _BACKENDS.get(backend)
        if rule is None:
            raise UserError(
                f"sglang.{name} {backend} is not known to serve a memory network; use {', '.join(_BACKENDS)}"
            )
        if (rule == _EQUAL and theirs != ours) or (rule == _NOT_MORE and theirs > ours):
            raise UserError(
                f"sglang.{name} {backend} needs {rule} query heads in the memory network ({theirs}) "
                f"{'as' if rule == _EQUAL else 'than'} in the policy ({ours}); use fa3"
            )


def _check_network(whose: str, config: Any, tp: int) -> None:
    if _architecture(config) not in (*COMPOSITES, *COMPOSITES.values()):
        raise UserError(
            f"the {whose} is a {_architecture(config)}; an engine with a memory network holds "
            f"{' and '.join(COMPOSITES)} only"
        )
    if getattr(config, "use_sliding_window", False):
        raise UserError(f"the {whose} has sliding-window attention, which does not share a cache with another network")
    if config.num_attention_heads % tp:
        raise UserError(f"the {whose} has {config.num_attention_heads} query heads, which tp={tp} does not divide")
    if config.intermediate_size % tp:
        raise UserError(
            f"the {whose} has an intermediate_size of {config.intermediate_size}, which tp={tp} does not divide"
        )


def _architecture(config: Any) -> str:
    return str((getattr(config, "architectures", None) or ["(none)"])[0])


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
