"""The share of a memory network's heads in its policy's key-value pool, and the attention back-ends for that.

Of SGLang 0.5.21's back-ends, those that serve both are known here by GPU and by heads.

Where nothing is set SGLang chooses by the GPU (`get_default_attn_backend`): fa3 on Hopper (compute capability 9),
trtllm_mha on B200, GB200 and B300 (10), flashinfer on others. fa3 has kernels for capabilities 8 and 9 only, and
trtllm_mha was not read for two networks in one cache. An engine with a memory network that SGLang's choice does not
serve gets another one by default. **None of this has run on a GPU.**
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megasharp.common.errors import UserError

Capability = tuple[int, int]
ATTENTION_KEYS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
# Number of the memory's query heads that each attention back-end accepts, compared with the policy's.
_ANY, _NOT_MORE, _EQUAL = "any number of", "not more", "as many"
_BACKENDS = {"torch_native": _ANY, "fa3": _ANY, "flashinfer": _EQUAL, "triton": _NOT_MORE}
_FA3 = (8, 9)
_WITHOUT_FA3 = "flashinfer"
# SGLang's choice by the major compute capability, and on all other GPUs.
_CHOICES, _CHOICE = {9: "fa3", 10: "trtllm_mha"}, "flashinfer"


@dataclass(frozen=True, slots=True)
class HeadsInPool:
    """The memory's key-value heads in the pool of one rank, whose layers have the policy's number of heads.

    Each of its heads stands there `repeats` times, and each of its layers takes `layers` of the pool's, with an equal
    part of its heads in each; one of the two is 1. `queries`: query heads of such a part.
    """

    repeats: int
    layers: int
    queries: int


def heads_in_pool(policy: Any, memory: Any, tp: int) -> HeadsInPool:
    """Lay the memory's heads out on one of `tp` ranks.

    Raises UserError where they neither fill the policy's number of heads nor are a multiple of it.
    """
    ours, theirs = (max(1, int(config.num_key_value_heads) // tp) for config in (policy, memory))
    queries: int = memory.num_attention_heads // tp
    where = f"(per rank, tp={tp}) " if tp > 1 else ""
    if ours % theirs and theirs % ours:
        raise UserError(
            f"the memory network has {theirs} key-value heads {where}and the policy {ours}; "
            "one must be a multiple of the other, because they share one cache"
        )
    if theirs > ours:
        return HeadsInPool(1, theirs // ours, queries * ours // theirs)
    if (queries // theirs) % (ours // theirs):
        raise UserError(
            f"the memory network's {queries} query heads {where}on {theirs} key-value heads cannot be shared among the "
            f"policy's {ours}; take a memory network with {ours} key-value heads"
        )
    return HeadsInPool(ours // theirs, 1, queries)


def check_kernels(flags: Mapping[str, Any], capability: Capability | None) -> None:
    """Raises UserError for a back-end that this GPU has no kernels for; None: the GPU is not known here."""
    if capability is None or capability[0] in _FA3:
        return
    for name in ATTENTION_KEYS:
        if flags.get(name) == "fa3":
            raise UserError(
                f"sglang.{name} fa3 has no kernels for {_named(capability)}; use {_WITHOUT_FA3}, or leave it out"
            )


def check_attention(kernels: Any, policy: Any, memory: Any, tp: int, capability: Capability | None = None) -> None:
    """Raises UserError where SGLang's attention back-end plans with the policy's heads in a way that the memory breaks.

    `kernels` has each of `ATTENTION_KEYS`; None where SGLang has not chosen yet, or another one counts.
    """
    ours, theirs = _queries(policy, memory, tp)
    usable = _usable(ours, theirs, capability)
    if not usable:
        raise UserError(
            f"the memory network has {theirs} query heads and the policy {ours}: only fa3 serves more than the "
            f"policy's, and it has no kernels for {_named(capability)}; take a memory network with at most {ours}"
        )
    for name in ATTENTION_KEYS:
        backend = getattr(kernels, name)
        if backend is None or backend in usable or backend == "torch_native":
            continue
        rule = _BACKENDS.get(backend)
        remedy = f"use {' or '.join(usable)}"
        if rule is None:
            raise UserError(f"sglang.{name} {backend} is not known to serve a memory network; {remedy}")
        raise UserError(
            f"sglang.{name} {backend} needs {rule} query heads in the memory network ({theirs}) "
            f"{'as' if rule == _EQUAL else 'than'} in the policy ({ours}); {remedy}"
        )


def default_attention(policy: Any, memory: Any, tp: int, capability: Capability | None) -> str | None:
    """Return the back-end for both networks where SGLang's own choice for this GPU is none; None: leave it to SGLang.

    Raises UserError as `check_attention`.
    """
    if capability is None:
        return None
    check_attention(SimpleNamespace(**dict.fromkeys(ATTENTION_KEYS)), policy, memory, tp, capability)
    usable = _usable(*_queries(policy, memory, tp), capability)
    return None if _CHOICES.get(capability[0], _CHOICE) in usable else usable[0]


def _queries(policy: Any, memory: Any, tp: int) -> tuple[int, int]:
    """Return the query heads of an attention layer over all ranks: the policy's, and the memory's."""
    return int(policy.num_attention_heads), heads_in_pool(policy, memory, tp).queries * tp


def _usable(ours: int, theirs: int, capability: Capability | None) -> list[str]:
    """List the back-ends on a GPU that serve both networks, the best first; of all GPUs where it is not known."""
    fits = {_ANY: True, _EQUAL: theirs == ours, _NOT_MORE: theirs <= ours}
    with_fa3 = capability is None or capability[0] in _FA3
    return [
        name
        for name, rule in _BACKENDS.items()
        if name != "torch_native" and fits[rule] and (name != "fa3" or with_fa3)
    ]


def _named(capability: Capability | None) -> str:
    return "this GPU" if capability is None else f"this GPU (compute capability {capability[0]}.{capability[1]})"
