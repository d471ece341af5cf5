"""Strict configuration: YAML with includes, dotted overrides, validation; and where a path in a file leads.

Every mistake becomes one `UserError` line that names the file and the key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from megasharp.common.errors import UserError, one_line, reason_at
from megasharp.common.section import Section
from megasharp.config.mistakes import first_mistake, shown
from megasharp.config.origin import origin

_PACKAGE = Path(__file__).resolve().parents[1]
# Parent of `configs` and the quickstart: a folder of the package in a wheel (setup.py), else the repository.
SHIPPED = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent
PRESETS = SHIPPED / "configs"


def find(path: str, beside: Path | None = None) -> Path:
    """Return the first that exists: below the folder `beside`, as written, in what megasharp ships, in its presets.

    As written means from the working directory. A path that exists nowhere is returned as written, for the caller's
    own message.

    Example: `find("algo/grpo.yaml")` is the preset, where the working directory has no such file.
    """
    written = Path(path).expanduser()
    near = [beside / written] if beside is not None else []
    return next((place for place in (*near, written, SHIPPED / written, PRESETS / written) if place.exists()), written)


# The tree as YAML gives it, before validation: it never leaves this package.
Tree = dict[str, Any]
# Takes a file's own tree and the file's path, and returns the tree that is laid over what the file includes.
Rewrite = Callable[[Tree, Path], Tree]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as text; people mean a number. And of a key that is written twice it keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is written twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` would read as numbers."""


for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$|^[-+]?(\d[\d_]*)?\.\d[\d_]*$|^[-+]?\d+\.$"),
        list("-+0123456789."),
    )


def parse_yaml(text: str, where: str) -> Any:
    """Return the value written in `text`. Raises UserError naming `where` when it is not YAML."""
    try:
        return deepcopy(_loaded(text))
    # PyYAML itself raises ValueError for a date such as 2026-13-45, and cannot go down a thousand lists.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid YAML: {_yaml_problem(error)}") from error


@lru_cache(maxsize=512)
def _loaded(text: str) -> Any:
    """Parse once what is read again and again: a sweep reads the same presets for each of its runs."""
    return yaml.load(text, Loader=_Loader)


# Texts of PyYAML that few would understand.
_IN_WORDS = {
    "mapping values are not allowed here": "a second ': ' in one line, or an indented line below a value; put texts in "
    "quotes",
    "found unexpected end of stream": "a quote that is not closed",
    "found character '\\t' that cannot start any token": "a tab; indent with spaces",
}


def _yaml_problem(error: Exception) -> str:
    """Return what PyYAML found and on which line. Example: "'steps' is written twice (line 3)"."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return one_line(error)
    return f"{_IN_WORDS.get(problem, problem)} (line {mark.line + 1})"


def merge(base: Tree, over: Tree) -> Tree:
    """Lay `over` on `base`: tables merge key by key, any other value is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of `tree` with its dotted path; an empty table is a value."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_tree(path: Path, rewrite: Rewrite = lambda tree, _: tree, seen: tuple[Path, ...] = ()) -> Tree:
    """Read a YAML file and the pieces it includes; later pieces override earlier ones, the file overrides all.

    An include is looked up beside the file, from the working directory, and among the shipped presets, in this order.
    `seen` are the files that led to this one. Raises UserError for a file that cannot be read, or includes itself.
    """
    path = path.resolve()
    if path in seen:
        raise UserError(f"{path}: include leads back to itself")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the configuration file: {reason_at(error, path)}") from error
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        found = "an empty file" if tree is None else shown(tree)
        raise UserError(f"{path}: expected a table of keys, found {found}")
    return included(tree, path, rewrite, seen)


def included(tree: Tree, path: Path, rewrite: Rewrite = lambda tree, _: tree, seen: tuple[Path, ...] = ()) -> Tree:
    """Lay `tree`, the content of a file at `path`, over the pieces that it includes. Raises UserError."""
    tree = dict(tree)
    includes = tree.pop("include", [])
    if not isinstance(includes, list) or not all(isinstance(item, str) for item in includes):
        raise UserError(f"{path}: include: expected a list of file names")
    merged: Tree = {}
    for item in includes:
        piece = find(item, path.parent)
        if not piece.exists():
            raise UserError(f"{path}: include: {_no_piece(item, path.parent)}")
        merged = merge(merged, read_tree(piece, rewrite, (*seen, path)))
    return merge(merged, rewrite(tree, path))


def _no_piece(item: str, folder: Path) -> str:
    """Say where an included file was looked up, with the nearest name of a preset."""
    presets = [found.relative_to(PRESETS).as_posix() for found in PRESETS.rglob("*.yaml")]
    near = get_close_matches(item.removeprefix("configs/"), presets, n=1, cutoff=0.7)
    hint = f"; is it configs/{near[0]}?" if near else ""
    return f"no file {item} in {folder}, in the working directory, or among megasharp's presets{hint}"


def nested(key: str, value: Any) -> Tree:
    """Put a value below the tables of its dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    tree: Tree = value
    return tree


def apply_overrides(tree: Tree, overrides: Sequence[str]) -> Tree:
    """Apply `a.b.c=value` items, values read as YAML. Raises UserError for an item of another form."""
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key or not all(key.split(".")):
            raise UserError(f"override {item!r}: expected key=value with a dotted key, such as policy.tp=2")
        if key == "include":
            raise UserError(
                f"override {item!r}: include belongs in a file, not on the command line; write a file with "
                "include: [run.yaml, configs/algo/casp.yaml] and name that"
            )
        tree = merge(tree, nested(key, parse_yaml(text, f"override {item!r}")))
    return tree


SectionT = TypeVar("SectionT", bound=Section)


def validate(
    schema: type[SectionT],
    tree: Tree,
    where: str,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    made_of: Callable[[str], str] = lambda key: "",
) -> SectionT:
    """Build `schema` from `tree`, which was read from `file` and overridden.

    Raises UserError: one line, first mistake, `where: dotted.key: reason (line 4)`. Without a `file` the words of
    `made_of` about the dotted key stand there, if it has any.
    """
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        mistake = first_mistake(error, schema, tree)
        if file is not None:
            written = origin(mistake.place, file, overrides, find)
        else:
            written = made_of(".".join(map(str, mistake.place)))
        raise UserError(mistake.told(where, written)) from None


def dump_yaml(section: Section) -> str:
    """Return the resolved configuration as YAML, keys in schema order."""
    return dump_tree(section.model_dump(mode="json"))


def dump_tree(tree: Tree) -> str:
    """Return a tree as YAML that `read_tree` reads back."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text
