"""Files of other trainers, read into flat keys: YAML and JSON, shell scripts with overrides or flags, Python.

A script is read and never run. Of a variable that it does not set the name stays in the value, behind a mark.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasharp.common.errors import UserError, one_line, reason_at
from megasharp.config.core import flat, parse_yaml
from megasharp.config.synonyms import spelled

# Around the name of what a script does not set; no file has it.
_MARK = "\x01"
_UNSET = re.compile(f"{_MARK}(.*?){_MARK}")
_OPENERS = {"if", "case", "for", "while", "until"}
_CLOSERS = {"fi", "esac", "done"}
_BEFORE_ASSIGNMENT = {"then", "else", "do", "export", "local", "declare", "readonly", "&&"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_OVERRIDE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^{}]*))?\}")
_OPERATORS: Mapping[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass
class Written:
    """Keys of a file with their values, flat; keys whose value is not in it, with the reason; what a reader noted."""

    given: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, text: str, where: str, *, in_branch: bool = False) -> None:
        """Take the value that a script writes for a key; of several branches the first one's."""
        key = spelled(key)
        if in_branch and (key in self.given or key in self.unread):
            return
        self.given.pop(key, None)
        self.unread.pop(key, None)
        unset = list(dict.fromkeys(f"${name}" for name in _UNSET.findall(text)))
        if unset:
            self.unread[key] = f"its value has {', '.join(unset)}, which {Path(where).name} does not set"
        else:
            self.given[key] = parse_yaml(text, f"{where}: {key}")


def read_text(path: Path) -> str:
    """Return a file's text. Raises UserError for one that cannot be read, is empty, or is no text."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read it: {reason_at(error, path)}") from None
    if not text.strip():
        raise UserError(f"{path} is empty")
    if "\0" in text or _MARK in text:
        raise UserError(f"{path} is no text")
    return text


def is_script(path: Path, text: str) -> bool:
    """Return whether a file is to be read as a shell script: by its ending, else by its first word of YAML or JSON."""
    if path.suffix in (".yaml", ".yml", ".json"):
        return False
    return path.suffix in (".sh", ".bash") or not re.match(r"\s*\{|(\s*#[^\n]*\n|\s*\n|---\n)*[\w.]+:(\s|$)", text)


def read_tree_of(path: Path, text: str, *, deep: bool) -> Written:
    """Read YAML or JSON; with `deep` tables are flattened, and what OmegaConf would look up in the file is.

    Raises UserError for anything but a table of keys.
    """
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict) or not tree:
        raise UserError(f"{path}: expected a table of keys, found {type(tree).__name__ if tree != {} else 'none'}")
    values = {str(key): value for key, value in (flat(tree) if deep else tree.items())}
    written = Written()
    for key, value in values.items():
        found = value
        for _ in range(10):
            asked = _REFERENCE.fullmatch(found) if isinstance(found, str) else None
            if asked is None:
                break
            default = parse_yaml(asked[2], f"{path}: {key}") if asked[2] is not None else found
            found = values.get(asked[1], default)
        if isinstance(found, str) and "${" in found:
            written.unread[spelled(key)] = f"its value is {found}, which is not in the file"
        elif found != "???":
            written.given[spelled(key)] = found
    return written


def read_overrides(path: Path, text: str) -> Written:
    """Read what a shell script, or a line of one, passes to hydra. Raises UserError where that is nothing."""
    written = Written()
    branched: list[str] = []
    for words, in_branch in _commands(text, branched):
        for number, word in enumerate(words):
            name = re.match(r"--config-(name|path)(?:=(.*))?$", word)
            if name:
                value = name[2] or (words[number + 1] if number + 1 < len(words) else "")
                written.add(f"config_{name[1]}", value.removesuffix(".yaml"), str(path))
            found = _OVERRIDE.fullmatch(word)
            # verl's keys have dots; other words with a = are the shell's.
            if found is None or "." not in found[2]:
                continue
            if found[1] == "~":
                written.unread[spelled(found[2])] = "the script takes the key out"
            else:
                written.add(found[2], found[3], str(path), in_branch=in_branch)
                branched += [found[2]] if in_branch else []
    if not any("." in key for key in (*written.given, *written.unread)):
        raise UserError(f"{path}: no overrides of verl in it, such as data.train_batch_size=1024")
    if branched:
        names = ", ".join(dict.fromkeys(branched))
        written.notes.append(f"the script has branches, and the first that sets one of these was taken: {names}")
    return written


def read_flags(path: Path, text: str) -> Written:
    """Read `--key value` and `--key=value` from a shell script. Raises UserError where there are none."""
    written = Written()
    for words, in_branch in _commands(text, []):
        flags: dict[str, list[str]] = {}
        for word in words:
            if word.startswith("--") and len(word) > 2:
                key, equals, value = word[2:].partition("=")
                flags[key] = [value] if equals else []
                current = key
            elif word in ("|", ";", "&", "&&", "2>&1") or word.endswith(".py"):
                current = ""
            elif flags and current:
                flags[current].append(word)
        for key, values in flags.items():
            off = not values and key.startswith(("no_", "no-"))
            several = f"[{', '.join(values)}]" if len(values) > 1 else "".join(values)
            written.add(key[3:] if off else key, several if values else str(not off), str(path), in_branch=in_branch)
    if not written.given and not written.unread:
        raise UserError(f"{path}: no flags of TRL in it, such as --learning_rate 1e-6")
    return written


def read_python(path: Path, text: str) -> Written:
    """Read the arguments of `GRPOConfig(...)` that are written out. Raises UserError where there is no such call."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path}: not valid Python: {one_line(error)}") from None
    written = Written()
    for call in ast.walk(tree):
        name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or name not in ("GRPOConfig", "ModelConfig", "ScriptArguments"):
            continue
        for keyword in call.keywords:
            key = keyword.arg or f"**{ast.unparse(keyword.value)}"
            try:
                written.given[key] = ast.literal_eval(keyword.value)
            except ValueError:
                written.unread[key] = f"its value is the expression {ast.unparse(keyword.value)}"
    if not written.given and not written.unread:
        raise UserError(f"{path}: no GRPOConfig(...) with arguments in it; give TRL's YAML or command line instead")
    written.notes.append("of the script only GRPOConfig was read: model, rows and rewards are arguments of its trainer")
    return written


def _commands(text: str, branched: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Yield the words of each command of a shell script, its variables put in, and whether a branch has it.

    `branched` gets the variables that were set in a branch.
    """
    variables = {"HOME": "~"}
    depth, held = 0, ""
    for line in text.replace("\\\n", " ").splitlines():
        held = f"{held}\n{line}" if held else line
        try:
            words = shlex.split(_expanded(held, variables), comments=True)
        except ValueError:
            # A quote goes on in the next line.
            continue
        held = ""
        words = [word[len(opened[0]) :] if (opened := _ARRAY.match(word)) else word for word in words]
        words = [word[:-1] if word.endswith(")") and "(" not in word else word for word in words]
        depth = max(0, depth + sum(word.strip(";") in _OPENERS for word in words))
        inside = depth > 0
        before = ";"
        passed: list[str] = []
        for word in words:
            found = _ASSIGNMENT.fullmatch(word)
            if found and (before.endswith((";", "=", ")")) or before in _BEFORE_ASSIGNMENT):
                if not (inside and variables.get(found[1])):
                    variables[found[1]] = found[2].rstrip(";")
                    branched += [found[1]] if inside else []
                # A variable that holds overrides is there to be passed on.
                passed += found[2].split() if re.search(r"\s[\w.]+=", found[2]) else []
                before = "="
            else:
                passed += word.split() if re.search(r"=\S*\s+\+*[\w.]+\.[\w.]+=", word) else [word]
                before = word
        yield passed, inside
        depth = max(0, depth - sum(word.strip(";") in _CLOSERS for word in words))


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    """Put variables, their `:-` defaults and arithmetic into a line; what is not known gets the mark."""

    def known(name: str, default: str | None = None) -> str:
        if variables.get(name):
            return variables[name]
        return default if default is not None else variables.get(name, f"{_MARK}{name}{_MARK}")

    def of_default(found: re.Match[str]) -> str:
        return known(found[1], found[2])

    def number(found: re.Match[str]) -> str:
        try:
            return str(_number(ast.parse(found[1].strip(), mode="eval").body, variables))
        except (ValueError, SyntaxError, ZeroDivisionError):
            return f"{_MARK}(({found[1].replace(_MARK, '')})){_MARK}".replace(" ", "")

    for _ in range(20):
        before = line
        line = re.sub(r"\$([A-Za-z_]\w*)", lambda found: known(found[1]), line)
        line = re.sub(r"\$[@*#?!\d]", f"{_MARK}@{_MARK}", line)
        line = re.sub(r"\$\{(\w+)(?::?[-=]([^${}]*))?\}", of_default, line)
        line = re.sub(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)", number, line)
        # Expansions that still stand after a round without a change are not supported: they get the mark.
        if line == before:
            line = re.sub(r"\$\([^()$]*\)", f"{_MARK}(...){_MARK}", line)
            line = re.sub(r"\$\{(\w*)[^${}]*\}", f"{_MARK}{{\\1...}}{_MARK}", line)
        if line == before:
            break
    return line


def _number(node: ast.expr, variables: Mapping[str, str]) -> int:
    """Return what shell arithmetic gives. Raises ValueError for anything but whole numbers."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return int(variables.get(name, ""))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, variables)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS and not (
            isinstance(op, ast.Pow) and _number(right, variables) > 64
        ):
            value = _OPERATORS[type(op)](_number(left, variables), _number(right, variables))
            return int(value)
    raise ValueError("not whole numbers")
