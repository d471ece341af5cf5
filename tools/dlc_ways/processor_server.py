"""`python processor_server.py CONFIG.json`: a SGLang server that takes logit processors, which our engines refuse.

For the measurement only: whoever reaches such a server can run code in it. The overlap schedule is off, see
`processor.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megasharp.rollout.sglang.engine.engine_config import EngineConfig, read_config
from megasharp.rollout.sglang.engine.server import (
    prepare,
    run_detokenizer,
    run_scheduler,
)


def serve(config: EngineConfig) -> None:
    """Serve until the process is told to end."""
    prepare(config.settings(), config.device, config.tp)
    from megasharp.rollout.sglang.engine import sglang_internals

    own = {"enable_custom_logit_processor": True, "disable_overlap_schedule": True}
    sglang_internals.launch_server(
        sglang_internals.ServerArgs(**config.server_args(), **own),
        run_scheduler_process_func=run_scheduler,
        run_detokenizer_process_func=run_detokenizer,
    )


if __name__ == "__main__":
    # The scheduler finds the processor by its module's name; spawned children take over this process's path.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    serve(read_config(Path(sys.argv[1])))
