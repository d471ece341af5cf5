"""The place that a key of a merged configuration comes from: an override, or a line of one of its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

# Finds a file that another one includes, by its name and the folder of the other.
Find = Callable[[str, Path], Path]


def origin(place: Sequence[int | str], file: Path, overrides: Sequence[str], find: Find) -> str:
    """Return where the value at `place` is written; empty where no file or override has it.

    Example: `origin(("policy", "tp"), Path("my.yaml"), ["steps=3"], find)` is `line 4`.
    """
    names = tuple(map(str, place))
    for item in reversed(overrides):
        name, _, text = item.partition("=")
        key = tuple(name.split("."))
        if names[: len(key)] == key and _reached(yaml.compose(text, Loader=yaml.SafeLoader), names[len(key) :]):
            return f"override {name}"
    found = _line(names, file, find)
    if found is None:
        return ""
    path, line = found
    return f"line {line}" if path == file else f"{path}, line {line}"


def _line(names: Sequence[str], file: Path, find: Find) -> tuple[Path, int] | None:
    """Return the file and the line of a key: this file, else the last of those it includes that has the key."""
    root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    if names and (line := _reached(root, names)):
        return file, line
    included = _entry(root, "include")
    listed = included[1].value if included and isinstance(included[1], yaml.SequenceNode) else []
    for each in reversed(listed):
        if (found := _line(names, find(each.value, file.parent), find)) is not None:
            return found
    return None


def _reached(node: yaml.Node | None, names: Sequence[str]) -> int:
    """Return the line of what `names` lead to below `node`; 0 where they lead nowhere."""
    line = 1
    for name in names:
        below = _entry(node, name)
        if below is None:
            return 0
        line, node = below
    return line


def _entry(node: yaml.Node | None, name: str) -> tuple[int, yaml.Node] | None:
    """Return the line and the value of an entry of a table or list; None where it has none."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == name:
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and name.isdigit() and int(name) < len(node.value):
        value = node.value[int(name)]
        return value.start_mark.line + 1, value
    return None
