"""The installed SGLang's flags: names, values where nothing is said, and the check of a value's type and choices.

Imports sglang only where it is asked for the flags.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


def _no_fault(value: object) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Flag:
    """One field of ServerArgs. `fault` says what is wrong with a value, None where nothing is."""

    default: Any
    fault: Callable[[object], str | None] = _no_fault


def installed_flags() -> dict[str, Flag]:
    """Every flag of the installed SGLang, by name."""
    from megasharp.serving.engine import arguments

    return {each.name: Flag(each.default, arguments.judge(each.type)) for each in arguments.fields()}


def skip_the_packages_own_imports() -> None:
    """Let `installed_flags` take half the time, in a process that does nothing else with SGLang and then ends.

    SGLang's package imports transformers, Triton and its language front end before any of its modules; the module of
    its arguments needs none of them.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations is not None, "whether it is installed is checked first"
    package = ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["sglang"] = package
