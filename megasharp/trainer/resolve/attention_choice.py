"""Refuses kernels of attention that a run asks for by name and cannot have. What `auto` takes, the ranks decide."""

from __future__ import annotations

import torch

from megasharp.common.errors import UserError
from megasharp.config.run_config import RunConfig
from megasharp.convert.architecture import Architecture
from megasharp.ops.attention_kernels import Site, Software, refusal, software_here
from megasharp.trainer.resolve.devices import device_of


def check_attention(
    config: RunConfig, architecture: Architecture, where: str, *, here: bool, response_window: int | None = None
) -> None:
    """Raise UserError, in one line, where `policy.attention` cannot be used with this model on the run's device.

    `here`: the run is to start in this Python, and without a cluster on this machine's GPUs. `response_window`: of this
    model, where it is a memory network.
    """
    wanted = config.policy.attention
    if wanted == "auto":
        return
    site = attention_site(config, architecture, response_window, here=here)
    problem = refusal(wanted, site, software_here() if here else Software())
    if problem:
        raise UserError(f"{where}: policy.attention={wanted}: {problem}, or leave policy.attention at auto")


def attention_site(
    config: RunConfig, architecture: Architecture, response_window: int | None = None, *, here: bool
) -> Site:
    """Return what is known of the place where attention is computed before ranks start."""
    gpu, local = device_of(config) == "cuda", config.cluster.backend == "local"
    return Site(
        gpu=gpu,
        dtype=config.model.dtype if config.model.dtype != "auto" else "bfloat16",
        head_dims=(architecture.head_dim,),
        windows=architecture.smallest_window is not None,
        response_window=response_window is not None,
        deterministic=config.deterministic,
        capability=torch.cuda.get_device_capability() if here and gpu and local and torch.cuda.is_available() else None,
    )
