"""The process that others are forked from on CPUs: it imports what they need, once, and may do so ahead of need."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from types import MappingProxyType

from megasharp.common import signals
from megasharp.common.environment_variables import variables

_SAFE_PATH = "PYTHONSAFEPATH"
# The modules that `start` asked for; a server that is started again imports them, too.
_asked: list[str] = []


def start(modules: Sequence[str]) -> None:
    """Start this process's fork server, which imports `modules`; nothing to do where it runs already.

    It ends with this process.
    """
    _asked[:] = modules
    context(modules)
    with signals.held(), child_environment(), signals.kept_from_children():
        forkserver.ensure_running()


def context(modules: Sequence[str]) -> ForkServerContext:
    """Return the context that forks from this server, which imports `modules` where `start` asked for nothing."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*(_asked or modules)])
    return found


def child_environment(given: Mapping[str, str] = MappingProxyType({})) -> AbstractContextManager[None]:
    """Give children that start inside these variables, and no modules of the folder where the user happens to be.

    Until they have this process's own path, Python would look there first, for its own modules too.
    """
    return variables({**given, _SAFE_PATH: "1"})
