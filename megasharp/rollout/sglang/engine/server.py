"""One engine: SGLang's HTTP server over its scheduler and detokenizer processes, with our changes in each."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

from megasharp.common.group_environment import compute_capability, keep_to
from megasharp.rollout.sglang.engine import lifeline
from megasharp.rollout.sglang.engine.check import PLATFORM_NAME, check_build, check_installed
from megasharp.rollout.sglang.engine.engine_config import (
    EngineConfig,
    EngineSettings,
    check_config,
    check_flags,
    cpu_binding,
    eviction_interval,
    installed_flags,
)
from megasharp.rollout.sglang.engine.rendezvous import held_port
from megasharp.rollout.sglang.engine.sleeping import Sleep
from megasharp.rollout.sglang.engine.torchvision_ops import define_missing_ops
from megasharp.rollout.sglang.identity import KEY_VARIABLE

_MODELS = "megasharp.rollout.sglang.engine.models"

# Now: a child imports this module to find its function, and then SGLang to read the function's arguments.
lifeline.end_with_parent()
define_missing_ops()


def serve(config: EngineConfig) -> None:
    """Serve until SIGTERM. Raises UserError for what is refused before SGLang starts."""
    check_installed(config.device)
    # Before SGLang's first import, and by NVML: CUDA must not begin before its variables are set.
    capability = None if config.device == "cpu" else compute_capability()
    check_config(config, capability)
    if ipaddress.ip_address(socket.gethostbyname(config.host)).is_loopback:
        keep_to("lo")
    prepare(config.settings(), config.device, config.tp)
    check_flags(config, installed_flags())
    check_build(config.device)
    from megasharp.rollout.sglang.engine import forking, server_patches, sglang_internals

    if config.device == "cpu":
        forking.fork_processes()
    server_patches.apply(Sleep(able=config.sleep, loses_weights=config.loses_weights), config.identity())
    with held_port() as meeting:
        sglang_internals.launch_server(
            sglang_internals.ServerArgs(**{"nccl_port": meeting, **config.server_args(capability)}),
            run_scheduler_process_func=run_scheduler,
            run_detokenizer_process_func=run_detokenizer,
            launch_callback=lambda: print(f"READY http://{config.host}:{config.port}", flush=True),
        )


def prepare(settings: EngineSettings, device: str, tp: int) -> None:
    """Set this process, and through its environment its children, up for SGLang; before SGLang's first import."""
    settings.publish()
    lifeline.publish()
    # It is in the configuration by now, and no child needs it.
    os.environ.pop(KEY_VARIABLE, None)
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = _MODELS
    if settings.memory_window is not None:
        os.environ["SGLANG_SWA_EVICTION_INTERVAL"] = str(eviction_interval(settings.memory_window))
    if device == "cpu":
        os.environ["SGLANG_PLATFORM"] = PLATFORM_NAME
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cpu_binding(tp))
        # With more threads than free cores GNU OpenMP spins: decoding fell from 440 to 18 tokens/s.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megasharp.rollout.sglang.engine import sglang_patches

    sglang_patches.apply()


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler process, one per rank; named by its module, so that the child imports our side first."""
    lifeline.end_with_parent()
    from megasharp.rollout.sglang.engine import sglang_internals, sglang_patches

    sglang_patches.apply()
    return sglang_internals.run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> Any:
    """SGLang's detokenizer process."""
    lifeline.end_with_parent()
    from megasharp.rollout.sglang.engine import sglang_internals

    return sglang_internals.run_detokenizer_process(*args, **kwargs)
