"""Kernels of attention by name, and the choice among them for a card, a model and this Python.

| name | kernels | cards | in this Python |
|---|---|---|---|
| `fa2` | FlashAttention-2 (arXiv 2307.08691) | compute capability 8.0 and later | torch's own |
| `fa3` | FlashAttention-3 (arXiv 2407.08608) | 9.0: Hopper | flash_attn_3: `flash_attn_interface` |
| `fa4` | FlashAttention-4, in CuTe | 10.x: Blackwell; 9.0 too | flash-attn-4: `flash_attn.cute` |
| `te` | Transformer Engine's: cuDNN's, or a flash-attn of its choice | 8.0 and later | `transformer_engine` |
| `blocks` | torch's scaled-dot-product attention on padded runs | every device | torch's own |

torch puts FA3's and FA4's kernels under its own operators for variable lengths (`torch.nn.attention`, read in 2.11 and
2.13). The limits are those of flash_attn_3 3.0.0, flash-attn-4 4.0.0b36 and Transformer Engine 2.20, by their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util
from inspect import signature
from pathlib import Path
from typing import Literal

import torch

from megasharp.common.errors import UserError

FlashName = Literal["fa2", "fa3", "fa4"]
KernelName = Literal["fa2", "fa3", "fa4", "te", "blocks"]
Wanted = Literal["auto", "fa2", "fa3", "fa4", "te"]

SAID: Mapping[KernelName, str] = {
    "fa2": "FlashAttention-2, torch's own",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "te": "Transformer Engine's",
    "blocks": "torch's scaled-dot-product attention, padded blocks",
}
# The names by which torch registers them.
REGISTERED: Mapping[KernelName, str] = {"fa3": "FA3", "fa4": "FA4"}
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
_LARGEST_HEAD_BLACKWELL = 128
_PACKAGES: Mapping[KernelName, str] = {
    "fa3": "flash_attn_3 (module flash_attn_interface; build it for this torch from the folder hopper of "
    "github.com/Dao-AILab/flash-attention)",
    "fa4": "flash-attn-4 (module flash_attn.cute; pip install --pre flash-attn-4)",
    "te": "Transformer Engine (pip install 'transformer-engine[pytorch,core_cu13]')",
}


@dataclass(frozen=True, slots=True)
class Site:
    """The place where attention is computed, by all models of a process; what is unknown does not refuse.

    `dtype`: torch's name of the queries' type. `windows`: some layer has a sliding window. `response_window`: a memory
    network has one (`learner/block_plan.py`). `capability`: of the GPU, None unknown.
    """

    gpu: bool
    dtype: str
    head_dims: tuple[int, ...] = ()
    windows: bool = False
    response_window: bool = False
    deterministic: bool = False
    capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Software:
    """The kernels that this Python lacks, each with the reason; `fa4_windows`: torch hands FA4's backward a window."""

    lacks: Mapping[KernelName, str] = field(default_factory=dict)
    fa4_windows: bool = True


@dataclass(frozen=True, slots=True)
class Kernels:
    """The chosen kernels, and why these."""

    name: KernelName
    reason: str

    def __str__(self) -> str:
        return f"{SAID[self.name]} ({self.name}), {self.reason}"


def software_here() -> Software:
    """Look for the packages, without importing them, and ask torch which kernels it can register."""
    register = getattr(torch.nn.attention, "list_flash_attention_impls", None)
    registered = register() if register is not None else []
    lacks: dict[KernelName, str] = {}
    there: dict[KernelName, bool] = {"fa3": _is_there("flash_attn_interface"), "fa4": _fa4_is_there()}
    for name, found in there.items():
        if not found:
            lacks[name] = f"it needs {_PACKAGES[name]}, which this Python has not"
        elif REGISTERED[name] not in registered:
            lacks[name] = f"torch {torch.__version__} cannot register it; install torch 2.11 or later"
    if not _is_there("transformer_engine"):
        lacks["te"] = f"it needs {_PACKAGES['te']}, which this Python has not"
    return Software(lacks, "FA4" not in registered or _fa4_takes_windows())


def _is_there(module: str) -> bool:
    return util.find_spec(module) is not None


def _fa4_is_there() -> bool:
    """Find `flash_attn.cute` without importing `flash_attn`, which may be FlashAttention-2 with its CUDA library."""
    spec = util.find_spec("flash_attn")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return any((Path(folder) / "cute" / "interface.py").is_file() for folder in folders)


def _fa4_takes_windows() -> bool:
    """torch 2.11 refuses a window in FA4's backward and 2.13 hands it on, by an argument of this function."""
    from torch.nn.attention import _fa4

    return "window_size_left" in signature(_fa4._fa4_run_backward).parameters


def refusal(name: KernelName, site: Site, software: Software) -> str:
    """Return why these kernels cannot be used, and what to do, in one clause; empty where nothing speaks against them.

    `auto` as the remedy is added by who reports it.
    """
    if name == "blocks":
        return ""
    if not site.gpu:
        return "it needs a GPU; set policy.device=cuda"
    if site.dtype not in ("bfloat16", "float16"):
        return f"its kernels take no {site.dtype}; set model.dtype=bfloat16"
    for size in site.head_dims:
        if size > LARGEST_HEAD or size % HEAD_MULTIPLE:
            return f"a head of {size} is above {LARGEST_HEAD} or no multiple of {HEAD_MULTIPLE}"
    return _of_card(name, site.capability) or software.lacks.get(name, "") or _of_model(name, site, software)


def _of_card(name: KernelName, capability: tuple[int, int] | None) -> str:
    if capability is None:
        return ""
    cards = {
        "fa3": ((9,), "Hopper cards (compute capability 9.0)"),
        "fa4": ((9, 10), "Hopper and Blackwell cards (compute capability 9.x and 10.x)"),
    }
    majors, text = cards.get(name, (range(8, 100), "cards of compute capability 8.0 and later"))
    major, minor = capability
    return "" if major in majors else f"it is for {text}, and this one has {major}.{minor}"


def _of_model(name: KernelName, site: Site, software: Software) -> str:
    largest = max(site.head_dims, default=0)
    blackwell = site.capability is not None and site.capability[0] >= 10
    if name == "fa3" and site.deterministic and largest > 192:
        return "its deterministic backward takes no head above 192; set deterministic=false"
    if name == "fa4":
        windows = site.windows or site.response_window
        if windows and not software.fa4_windows:
            return f"torch {torch.__version__} gives its backward no window; install torch 2.13"
        if blackwell and any(size > _LARGEST_HEAD_BLACKWELL and size != LARGEST_HEAD for size in site.head_dims):
            return f"on Blackwell it takes heads up to {_LARGEST_HEAD_BLACKWELL}, or of {LARGEST_HEAD}"
        if blackwell and windows and largest == LARGEST_HEAD:
            return f"on Blackwell it has no windows with heads of {LARGEST_HEAD}"
    if name == "te" and site.response_window:
        return (
            "it returns no log-sum-exps, by which the parts of recipe.dlc.window are joined; leave that window out, or "
            "set policy.attention=fa2"
        )
    return ""


def choose(wanted: Wanted, site: Site, software: Software, failed: Mapping[KernelName, str] | None = None) -> Kernels:
    """Choose kernels; `failed` are those that were tried and did not work, with the reason.

    `auto` takes the first for this card that nothing speaks against, and padded blocks where there is none. Raises
    UserError where the kernels that are wanted cannot be used.
    """
    if wanted == "auto" and not site.gpu:
        return Kernels("blocks", "the way of CPUs")
    passed_over = ""
    for name in _ranking(wanted, site):
        problem = (failed or {}).get(name, "") or refusal(name, site, software)
        if not problem:
            return Kernels(name, f"not {passed_over}" if passed_over else _why(wanted, site))
        if wanted != "auto":
            raise UserError(f"policy.attention={wanted}: {problem}, or leave policy.attention at auto")
        passed_over = passed_over or f"{name}: {problem}"
    return Kernels("blocks", f"not {passed_over}")


def _ranking(wanted: Wanted, site: Site) -> tuple[KernelName, ...]:
    if wanted != "auto":
        return (wanted,)
    by_card: Mapping[int, tuple[KernelName, ...]] = {9: ("fa3", "fa2"), 10: ("fa4", "fa2")}
    return by_card.get(site.capability[0] if site.capability else 0, ("fa2",))


def _why(wanted: Wanted, site: Site) -> str:
    if wanted != "auto":
        return f"because policy.attention={wanted}"
    card = f"compute capability {site.capability[0]}.{site.capability[1]}" if site.capability else "this card"
    return f"the right one for {card}"
