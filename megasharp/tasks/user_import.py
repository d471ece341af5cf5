"""A user's reward, environment or tool by its path: `package.module:name`, or `folder/file.py:name`.

Modules and files are found where Python finds its own, then beside the run file and in the working directory
(`look_beside`), which workers get too. Each process imports them for itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from megasharp.common.errors import UserError, nearest, one_line

Made = TypeVar("Made")
# Names that a message about a missing one has.
_MOST_NAMES = 8


def look_beside(file: Path) -> None:
    """Let a user's modules be found in the folder of a run file, and in the working directory, after all else."""
    for folder in (str(file.absolute().parent), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.append(folder)


@lru_cache(maxsize=64)
def imported(path: str, key: str = "reward.function") -> object:
    """Import what stands at `path`. Raises UserError, in one line that names the `key`, where nothing does."""
    place, colon, name = path.rpartition(":")
    is_file = place.endswith(".py")
    names = name.split(".") if is_file else (*place.split("."), *name.split("."))
    if not colon or not all(part.isidentifier() for part in names):
        raise UserError(f"{key}: {path!r} must be written package.module:name, or folder/file.py:name")
    try:
        found: object = _file(place, key) if is_file else import_module(place)
    except UserError:
        raise
    except Exception as error:  # a user's module may raise anything
        remedy = "mend it" if is_file else "put it beside the run file or into the working directory, or install it"
        raise UserError(
            f"{key}: cannot import {place} ({type(error).__name__}: {one_line(error)}); {remedy}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            there = _callables(found, part)
            raise UserError(
                f"{key}: {place} has no {name!r}; "
                + (nearest(part, there) if there else "nor any other function or class; name one that has it")
            )
        found = getattr(found, part)
    return found


def _callables(found: object, name: str) -> list[str]:
    """Return the functions and classes of a module or class, those most like `name` first; its own, if there are."""
    there = getattr(found, "__dict__", {})
    public = {each: value for each, value in there.items() if callable(value) and not each.startswith("_")}
    module = getattr(found, "__name__", "")
    own = [each for each, value in public.items() if getattr(value, "__module__", "") == module]
    names = sorted(own or public, key=lambda each: SequenceMatcher(None, name, each).ratio(), reverse=True)
    return names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], "..."]


def beside(use: str, folder: Path) -> str:
    """Return the path of a name with its file where the folder of the file that names it has that file."""
    place, _, name = use.rpartition(":")
    file = folder / Path(place).expanduser()
    return f"{file.resolve()}:{name}" if place.endswith(".py") and file.is_file() else use


def constructed(kind: Callable[..., Made], use: str, options: Mapping[str, Any], key: str) -> Made:
    """Make an object of a user's class. Raises UserError, naming the `key` and its value `use`, where it cannot be."""
    try:
        return kind(**options)
    except UserError:
        raise
    except Exception as error:  # a user's class may raise anything
        raise UserError(
            f"{key}: {use} cannot be made with options {json.dumps(options)} "
            f"({type(error).__name__}: {one_line(error)})"
        ) from error


def _file(written: str, key: str) -> ModuleType:
    """Import a file under a name of its own, so that it takes no module's place; its folder is searched last."""
    tried = [Path(folder) / Path(written).expanduser() for folder in ("", *sys.path)]
    file = next((place.resolve() for place in tried if place.is_file()), None)
    if file is None:
        raise UserError(
            f"{key}: there is no file {written}, neither beside the run file nor in {Path.cwd()}; "
            "give its path from one of the two"
        )
    name = f"user_{file.stem}_{sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    look_beside(file)
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    # Dataclasses and pickles look their module up by its name.
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
