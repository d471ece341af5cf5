"""Identity of an engine that a run did not start: the engine tells it, the run compares it with what it would start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The key of engines that are started by hand: in the environment, never in a file of the run.
KEY_VARIABLE = "MEGASHARP_ENGINE_KEY"
# Its place in what an engine says of itself.
FIELD = "megasharp"
# In it, the environment variables that NCCL's groups depend on; of the run, those that it needs to be equal.
VARIABLES = "variables"
# Keys of a config.json that do not change what a network computes; its numbers are pushed in the engines' own dtype.
_NO_MATTER = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_NAMED = 3


def identity(
    *,
    model: Path,
    memory: Path | None,
    memory_window: int | None,
    device: str,
    dtype: str,
    tp: int,
    deterministic: bool,
    returns_experts: bool,
) -> dict[str, Any]:
    """Describe an engine of this installation. Raises OSError or ValueError where a network's config is unreadable."""
    return {
        "source": _source(),
        "model": _config(model),
        "memory": None if memory is None else _config(memory),
        "memory_window": memory_window,
        "device": device,
        "dtype": dtype,
        "tp": tp,
        "deterministic": deterministic,
        "returns_experts": returns_experts,
    }


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Say in what an engine is another one than was wanted; None where it is the same."""
    if found.get("source") != wanted["source"]:
        return "it has another version of megasharp's engine; install the run's there"
    for name, what in (("model", "model"), ("memory", "memory network")):
        theirs, ours = found.get(name), wanted[name]
        if theirs is None and ours is None:
            continue
        if theirs is None or ours is None:
            return f"it has {'no' if theirs is None else 'a'} {what}, and the run has {'one' if ours else 'none'}"
        keys = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
        if keys:
            said = ", ".join(f"{key} {theirs.get(key)} instead of {ours.get(key)}" for key in keys[:_NAMED])
            return f"its {what} is another one: {said}{' and others' if len(keys) > _NAMED else ''}"
    for name in ("memory_window", "device", "dtype", "tp", "deterministic", "returns_experts"):
        if found.get(name) != wanted[name]:
            return f"its {name} is {json.dumps(found.get(name))}, and the run's {json.dumps(wanted[name])}"
    theirs, ours = found.get(VARIABLES) or {}, wanted.get(VARIABLES) or {}
    for name in sorted(ours):
        if theirs.get(name) != ours[name]:
            return f"its {name} is {theirs.get(name)} and the run's {ours[name]}: start both with {name}={ours[name]}"
    return None


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in _NO_MATTER}


def _source() -> str:
    """A digest of the engine's code and of what both halves share."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *folder.glob("engine/**/*.py")]):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
