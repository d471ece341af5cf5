"""Print how the package's code is cut: files, functions, imports, names, docstrings, each beside its limit.

    python tools/code_shape.py                         # the table; --json for all figures and lists
    python tools/code_shape.py --trace                 # also the files that one GRPO step runs through (15 s)
    python tools/code_shape.py --list once-called      # what is behind a figure, as file:line
    python tools/code_shape.py --limits                # exit code 1 where a limit is not met

A private function counts as called once where the package has one reference to it outside of itself and it could be
inlined: those named by tests or tools, generators, callbacks, decorated, recursive and overridden ones are listed by
`--list apart`. What would fit into its caller is said for one function at a time: two in one caller may be too much.
Functions are those of any depth, nested ones too; lines of a file are all lines.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from code_functions import Function, Module, Package, read_named, read_package, what_hinders, why_apart

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "megasharp"
MOST_LINES_OF_A_FILE = 700
MOST_LINES_OF_A_FUNCTION = 40
MOST_COMPLEX = 10
# Files of these names may be in several packages: the idea is the same.
SAME_IDEA = ("settings", "records")
# A command is named after its subject, and so is the file that holds the subject. The stub has the name that jobs know
# which were queued before a move.
NAMED_AFTER = (f"{PACKAGE}/cli/", f"{PACKAGE}/jobs/")
LISTS = (
    "once-called",
    "apart",
    "longest",
    "complex",
    "files",
    "imports",
    "same-names",
    "shared-names",
    "docstrings",
    "step",
)
_DUNDER = ("__init__", "__main__")
_STARTS_WRONGLY = re.compile(r"(What|Which|Whether|How|Who)\b")


@dataclass(frozen=True, slots=True)
class Rooms:
    """Folders of the package where one file is one idea, and those whose folders are packages of like chapters."""

    one_idea: tuple[str, ...]
    like_chapters: tuple[str, ...]


ROOMS = Rooms(("algos", "tasks/sets", "convert/families", "tasks/synlogic"), ("studies",))


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table, met at or below its limit, or with `at_least` at or above."""

    name: str
    value: float
    limit: float | None = None
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def text(self) -> str:
        value = f"{self.value:.1f}%" if self.unit else f"{self.value:.10g} "
        bar = "" if self.limit is None else f"{'>=' if self.at_least else '<='} {self.limit:g}{self.unit or ' '}"
        return f"{self.name:<58}{value:>9}{bar:>10}{'' if self.met else '  MISSED'}".rstrip()


class Shape:
    """A package's figures, and the lists behind them: lines of text that begin with file:line where there is one."""

    def __init__(self, repository: Path, package: Package, rooms: Rooms) -> None:
        self.figures: list[Figure] = []
        self.lists: dict[str, list[str]] = {}
        self._repository = repository
        self._package = package
        self._rooms = rooms
        self._modules = [*package.modules.values()]
        self._measure_files()
        self._measure_once_called()
        self._measure_functions()
        self._measure_names()
        self._measure_docstrings()

    def _measure_files(self) -> None:
        rooms = tuple(f"{PACKAGE}/{room}/" for room in self._rooms.one_idea)
        lines = {module.file: len(module.lines) for module in self._modules}
        chapters = {
            file: count
            for file, count in lines.items()
            if not file.endswith("/__init__.py") and not file.startswith(rooms)
        }
        total = sum(lines.values())
        imported = {module.file: _import_lines(module) for module in self._modules}
        futures = sum(module.imports.get("annotations", ("", ""))[0] == "__future__" for module in self._modules)
        commented = sum(map(_comment_lines, self._modules))
        large = {file: count for file, count in lines.items() if count > MOST_LINES_OF_A_FILE}
        self.figures += [
            Figure("Python files", len(lines), 340),
            Figure("lines of all files", total),
            Figure("median lines of a file: all files", median(lines.values())),
            Figure("  without __init__ and where one file is one idea", median(chapters.values()), 130, at_least=True),
            Figure(f"files above {MOST_LINES_OF_A_FILE} lines", len(large), 0),
            Figure("import lines of all lines", 100 * sum(imported.values()) / total, 7.5, "%"),
            Figure("  of these from __future__, lines", futures),
            Figure("comment lines of all lines", 100 * commented / total, unit="%"),
        ]
        self.lists["files"] = [f"{file}:1  {count} lines" for file, count in _largest_first(lines)]
        self.lists["imports"] = [
            f"{file}:1  {count} of {lines[file]} lines" for file, count in _largest_first(imported)
        ]

    def _measure_once_called(self) -> None:
        named = read_named(self._repository, ("tests", "tools"))
        functions = self._package.functions
        private = [each for each in functions if each.private]
        once = {each: why_apart(self._package, each, named) for each in private if len(each.references) == 1}
        counted = [each for each, reason in once.items() if not reason]
        share = 100 / len(functions)
        self.figures += [
            Figure("functions", len(functions)),
            Figure("private functions, methods among them", len(private)),
            Figure("private functions called once of all functions", share * len(counted), 12.0, "%"),
            Figure("  with those that are not counted", share * len(once), unit="%"),
        ]
        for reason, count in Counter(filter(None, once.values())).most_common():
            self.figures.append(Figure(f"  not counted: {reason}", count))
        self.lists["once-called"] = [*_by_package(counted)]
        self.lists["apart"] = [f"{each.place}  {each.name}  {reason}" for each, reason in once.items() if reason]

    def _measure_functions(self) -> None:
        functions = sorted(self._package.functions, key=lambda each: -each.lines)
        lengths = sorted(each.lines for each in functions)
        complex_ones = [(each, _reason(each)) for each in functions if each.complexity > MOST_COMPLEX]
        unexplained = sum(not reason for _, reason in complex_ones)
        self.figures += [
            Figure("lines of a function: median", _percentile(lengths, 50)),
            Figure("  p90", _percentile(lengths, 90)),
            Figure("  p99", _percentile(lengths, 99), MOST_LINES_OF_A_FUNCTION),
            Figure("  max", lengths[-1]),
            Figure(f"functions above complexity {MOST_COMPLEX}", len(complex_ones)),
            Figure("  without a comment that says why", unexplained, 0),
        ]
        above = [each for each in functions if each.lines > MOST_LINES_OF_A_FUNCTION]
        self.lists["longest"] = [f"{each.place}  {each.name}  {each.lines} lines" for each in above]
        self.lists["complex"] = [
            f"{each.place}  {each.name}  {each.complexity}  {reason or 'no comment says why'}"
            for each, reason in complex_ones
        ]

    def _measure_names(self) -> None:
        files: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for module in self._modules:
            stem = Path(module.file).stem
            if stem not in _DUNDER:
                files[stem].append((_package_of(module.file, self._rooms.like_chapters), module.file))
        files = {stem: places for stem, places in files.items() if len(places) > 1}
        clashes: list[str] = []
        shared: dict[str, list[str]] = {}
        for stem, places in sorted(files.items()):
            for package, count in Counter(package for package, _ in places).items():
                if count > 1:
                    clashes.append(f"{stem}  {' '.join(file for each, file in places if each == package)}")
            ideas = [file for _, file in places if not file.startswith(NAMED_AFTER)]
            if len({_package_of(file, ()) for file in ideas}) > 1:
                shared[stem] = ideas
        self.figures += [
            Figure("names of two files in one package", len(clashes), 0),
            Figure("names shared across packages, commands aside", len(shared)),
            Figure(f"  but for {', '.join(SAME_IDEA)}", len(shared.keys() - set(SAME_IDEA)), 0),
        ]
        self.lists["same-names"] = clashes
        self.lists["shared-names"] = [f"{stem}  {' '.join(places)}" for stem, places in shared.items()]

    def _measure_docstrings(self) -> None:
        found = [each for module in self._modules for each in _first_lines(module)]
        wrong = [(place, line) for place, line in found if _STARTS_WRONGLY.match(line)]
        self.figures += [
            Figure("docstrings", len(found)),
            Figure("  that begin with What, Which, Whether, How or Who", len(wrong), 0),
            Figure("  as a share of all", 100 * len(wrong) / max(len(found), 1), unit="%"),
        ]
        self.lists["docstrings"] = [f"{place}  {line}" for place, line in wrong]

    def add_step(self, calls: Sequence[tuple[str, int, str, int, int]]) -> None:
        """Add the figures of a traced step, from the rows of trace_step.py."""
        inside = Counter[str]()
        for file, _, _, count, _ in calls:
            inside[file] += count
        inside = +inside
        self.figures += [
            Figure("files of one GRPO step in process", len(inside), 58),
            Figure("  called more than once", sum(count > 1 for count in inside.values())),
            Figure("  functions", sum(row[3] > 0 for row in calls)),
            Figure("  files with what follows until the next step starts", len({row[0] for row in calls})),
        ]
        self.lists["step"] = []
        for file in sorted({row[0] for row in calls}):
            functions = [row for row in calls if row[0] == file]
            counts = f"{len(functions)} functions  {sum(row[4] for row in functions)} calls"
            self.lists["step"].append(f"{file}:1  {counts}{'' if file in inside else '  after the step'}")


def _largest_first(lines: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(lines.items(), key=lambda item: (-item[1], item[0]))


def _percentile(ordered: Sequence[int], percent: int) -> int:
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def _import_lines(module: Module) -> int:
    found = (node for node in ast.walk(module.tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return len({line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)})


def _comment_lines(module: Module) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    return sum(token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip() for token in tokens)


def _reason(function: Function) -> str:
    """Find the comment beside or above a function's first line, without its noqa."""
    lines, node = function.module.lines, function.node
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    above = lines[first - 2].strip() if first > 1 else ""
    beside = lines[node.lineno - 1].partition("#")[2]
    said = re.sub(r"noqa:\s*[A-Z]+[0-9]+(,\s*[A-Z]+[0-9]+)*", "", beside).strip(" #:()-")
    return said or (above.strip("# ") if above.startswith("#") else "")


def _first_lines(module: Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{module.file}:{node.body[0].lineno}", text.splitlines()[0]


def _package_of(file: str, like_chapters: Iterable[str]) -> str:
    """Name the package below the root that a file is in: a folder deeper where packages hold like chapters."""
    parts = Path(file).parts[1:-1]
    return "/".join(parts[:2] if parts and parts[0] in like_chapters else parts[:1])


def _by_package(functions: Sequence[Function]) -> Iterator[str]:
    """Render the private functions called once: name, lines of the body, caller, and what inlining would meet."""
    packages: dict[str, list[Function]] = defaultdict(list)
    for function in functions:
        packages[_package_of(function.module.file, ())].append(function)
    for package, members in sorted(packages.items()):
        notes = [what_hinders(each, MOST_LINES_OF_A_FUNCTION, MOST_COMPLEX) for each in members]
        yield f"{PACKAGE}/{package}: {len(members)}, of which {notes.count('')} fit into their callers as they are"
        for each, note in zip(members, notes, strict=True):
            [use] = each.references
            caller = f"{use.caller.name} ({use.caller.lines})" if use.caller else "<module>"
            where = f"{use.file}:" if use.file != each.module.file else ""
            call = f"{where}{use.line} {caller}{f'  [{note}]' if note else ''}"
            yield f"  {each.place}  {each.name}  {each.body_lines}  <- {call}"


def trace_step() -> list[tuple[str, int, str, int, int]]:
    """Run trace_step.py in a temporary folder; exits with the end of its output where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, str(REPOSITORY / "tools" / "trace_step.py"), "calls.json"]
        ran = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)
        if ran.returncode:
            sys.exit(f"trace_step.py failed:\n{(ran.stdout + ran.stderr)[-2000:]}")
        rows: list[list[str | int]] = json.loads((Path(folder) / "calls.json").read_text())
    return [(str(row[0]), int(row[1]), str(row[2]), int(row[3]), int(row[4])) for row in rows]


def _records(figures: Iterable[Figure]) -> Iterator[dict[str, str | float | bool | None]]:
    """Render figures for JSON; an indented name follows that of the row it belongs to."""
    above = ""
    for each in figures:
        above = above if each.name.startswith(" ") else each.name
        name = f"{above}, {each.name.strip()}" if each.name.startswith(" ") else each.name
        yield {"name": name, "value": each.value, "limit": each.limit, "at_least": each.at_least, "met": each.met}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="train three steps and trace the second")
    parser.add_argument("--list", choices=LISTS, help="print what is behind a figure instead; `step` traces one")
    parser.add_argument("--json", action="store_true", help="print figures and lists as JSON")
    parser.add_argument("--limits", action="store_true", help="exit with 1 where a limit is not met")
    return parser.parse_args()


def main() -> int:
    """Measure, print, and return the exit code."""
    asked = _arguments()
    for room in (*ROOMS.one_idea, *ROOMS.like_chapters):
        if not (REPOSITORY / PACKAGE / room).is_dir():
            sys.exit(f"{PACKAGE}/{room} is no folder (any more): correct ROOMS in tools/code_shape.py")
    shape = Shape(REPOSITORY, read_package(REPOSITORY, PACKAGE), ROOMS)
    if asked.trace or asked.list == "step":
        shape.add_step(trace_step())
    if asked.json:
        print(json.dumps({"figures": [*_records(shape.figures)], "lists": shape.lists}, indent=1))
    elif asked.list:
        print("\n".join(shape.lists[asked.list]))
    else:
        print("\n".join(each.text for each in shape.figures))
    return int(asked.limits and not all(each.met for each in shape.figures))


if __name__ == "__main__":
    sys.exit(main())
