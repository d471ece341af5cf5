"""All that an engine's processes share in /dev/shm carries one name, by which whoever stops the engine removes it.

SGLang ends its processes by force, which leaves their semaphores, message queues and load figures behind.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from megasharp.serving.engine import seams


def name_all_that_is_shared(folder: Path) -> None:
    """In this process and its children: files lie in `folder`, and what cannot lie in a folder begins with its name."""
    process: Any = multiprocessing.current_process()
    # How Python's own semaphores begin; children get it from their parent.
    process._config["semprefix"] = f"/{folder.name}"
    seams.stale_shm_cleanup._SGL_SHM_PREFIX = folder.name
    seams.load_snapshot.shm_path_for = lambda instance: str(folder / f"loads_{instance}")
