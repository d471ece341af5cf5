"""Everything that can be refused before SGLang starts, without starting it: asked for when a run's config is read."""

from __future__ import annotations

from megasharp.serving.engine.config import EngineConfig, check_config, check_flags
from megasharp.serving.engine.flags import installed_flags, skip_the_packages_own_imports
from megasharp.serving.engine.version import check_build, check_installed


def check(config: EngineConfig) -> None:
    """Raises UserError with the first thing that is wrong, as an engine would at its start; no port need be free.

    For a process that then ends: SGLang cannot be used in it afterwards.
    """
    check_installed(config.device)
    check_config(config)
    skip_the_packages_own_imports()
    check_flags(config, installed_flags())
    check_build(config.device)
