"""Read a package's files and functions: lengths, complexity, and where each private function is referenced.

References are resolved by name, through `from ... import`; an attribute of `self` or `cls` belongs to the class around
it or to its relatives in the package, any other attribute to the methods of that name of the same file, or else of all.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, str]

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_IN_EXPRESSION = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp)
_PRIVATE = re.compile(r"(?<!\w)_[A-Za-z]\w*")


@dataclass(eq=False)
class Module:
    """One Python file: `file` is relative to the repository, `name` dotted."""

    file: str
    name: str
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.file)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def imports(self) -> dict[str, Key]:
        """Names that `from ... import` binds anywhere in the file, each with the module and name it stands for."""
        found = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom) and node.module)
        return {each.asname or each.name: (str(node.module), each.name) for node in found for each in node.names}

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what `node` lies in, from the inside out; a decorator or default lies outside of its function."""
        while (parent := self.parents.get(node)) is not None:
            if not isinstance(parent, _SCOPES) or isinstance(parent, ast.Lambda) or node in parent.body:
                yield parent
            node = parent


@dataclass(frozen=True, slots=True)
class Reference:
    """One use of a function: `caller` is None at module level, `called` false where it is passed on.

    `in_expression` says that it lies in a lambda, a comprehension or a condition of an expression.
    """

    file: str
    line: int
    caller: Function | None
    called: bool
    awaited: bool
    in_expression: bool


@dataclass(eq=False, slots=True)
class Function:
    """One function of any depth. `owner` is its class, `nested` that it lies in another function's body."""

    module: Module
    node: FunctionNode
    owner: str | None
    nested: bool
    references: list[Reference] = field(default_factory=list)
    recursive: bool = False

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.node.name}" if self.owner else self.node.name

    @property
    def place(self) -> str:
        return f"{self.module.file}:{self.node.lineno}"

    @property
    def lines(self) -> int:
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1

    @property
    def body_lines(self) -> int:
        """Lines without signature and docstring."""
        documented = ast.get_docstring(self.node, clean=False) is not None
        body = self.node.body[1:] if documented else self.node.body
        return (self.node.end_lineno or 0) - body[0].lineno + 1 if body else 0

    @property
    def complexity(self) -> int:
        return 1 + _branches(self.node.body)

    @property
    def private(self) -> bool:
        name = self.node.name
        return not self.nested and name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _branches(body: Iterable[ast.stmt]) -> int:
    """Branches as ruff's C901 counts them."""
    return sum(_branches_of(each) for each in body)


def _branches_of(node: ast.stmt) -> int:
    match node:
        case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
            return 1 + _branches([*node.body, *node.orelse])
        case ast.Try() | ast.TryStar():
            handled = sum(1 + _branches(each.body) for each in node.handlers)
            return handled + bool(node.orelse) + _branches([*node.body, *node.orelse, *node.finalbody])
        case ast.With() | ast.AsyncWith():
            return _branches(node.body)
        case ast.Match():
            last = node.cases[-1]
            irrefutable = last.guard is None and isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
            return sum(1 + _branches(case.body) for case in node.cases) - irrefutable
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return 1 + _branches(node.body)
        case ast.ClassDef():
            return _branches(each for each in node.body if isinstance(each, FunctionNode))
    return 0


class Package:
    """A package's modules, functions and classes, with every reference to its private functions resolved."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.modules = {module.name: module for module in modules}
        self.functions: list[Function] = []
        self._bases: dict[Key, set[Key]] = {}
        self._top: dict[Key, Function] = {}
        self._methods: dict[str, dict[Key, Function]] = defaultdict(dict)
        self._of_node: dict[ast.AST, Function] = {}
        for module in modules:
            for node in ast.walk(module.tree):
                if isinstance(node, FunctionNode):
                    self._add_function(module, node)
                elif isinstance(node, ast.ClassDef):
                    named = (base for base in map(_last_name, node.bases) if base)
                    self._bases[module.name, node.name] = {(module.name, base) for base in named}
        self._bases = {key: {self.resolve(*base) for base in bases} for key, bases in self._bases.items()}
        for module in modules:
            self._add_references(module)

    def _add_function(self, module: Module, node: FunctionNode) -> None:
        scopes = [each for each in module.around(node) if isinstance(each, _SCOPES)]
        owner = scopes[0].name if scopes and isinstance(scopes[0], ast.ClassDef) else None
        function = Function(module, node, owner, nested=bool(scopes) and owner is None)
        self.functions.append(function)
        self._of_node[node] = function
        if owner:
            self._methods[node.name][module.name, owner] = function
        elif not scopes:
            self._top[module.name, node.name] = function

    def resolve(self, module: str, name: str) -> Key:
        """Follow imports from a name of a module to where it is defined, as far as that is in the package."""
        for _ in range(4):
            imported = self.modules[module].imports.get(name) if module in self.modules else None
            if imported is None or (module, name) in self._top or (module, name) in self._bases:
                break
            module, name = imported
        return module, name

    def _add_references(self, module: Module) -> None:
        for node in ast.walk(module.tree):
            for function in self._meant(module, node):
                inside = [self._of_node[each] for each in module.around(node) if isinstance(each, FunctionNode)]
                if function in inside:
                    function.recursive = True
                else:
                    function.references.append(_reference(module, node, inside[0] if inside else None))

    def _meant(self, module: Module, node: ast.AST) -> list[Function]:
        """Functions that a node of the syntax tree names."""
        match node:
            case ast.Name(id=name) if name.startswith("_"):
                return _known(self._top.get(self.resolve(module.name, name)))
            case ast.Attribute(value=ast.Name(id=base), attr=name) if name.startswith("_"):
                of_module = self._top.get((".".join(self.resolve(module.name, base)), name))
                return _known(of_module) or self._methods_meant(module, node, name, base)
            case ast.Attribute(attr=name) if name.startswith("_"):
                return self._methods_meant(module, node, name, "")
            case ast.Constant(value=str(text)) if _PRIVATE.fullmatch(re.split("[.:]", text)[-1]):
                name = re.split("[.:]", text)[-1]
                return _known(self._top.get((module.name, name))) or list(self._methods.get(name, {}).values())
        return []

    def _methods_meant(self, module: Module, node: ast.AST, name: str, base: str) -> list[Function]:
        found = self._methods.get(name, {})
        if base in ("self", "cls"):
            around = next((each.name for each in module.around(node) if isinstance(each, ast.ClassDef)), "")
            related = self.relatives((module.name, around))
        else:
            related = self.relatives(self.resolve(module.name, base))
        own = [function for key, function in found.items() if key in related]
        here = [function for (where, _), function in found.items() if where == module.name]
        return own or here or list(found.values())

    def relatives(self, key: Key) -> set[Key]:
        """A class with its ancestors and descendants in the package."""
        up, down = {key}, {key}
        while more := {base for each in up for base in self._bases.get(each, ())} - up:
            up |= more
        while more := {each for each, bases in self._bases.items() if bases & down} - down:
            down |= more
        return up | down

    def shares_its_name(self, function: Function) -> bool:
        """Check for a method that a relative of its class has too, or whose class is a protocol."""
        if not function.owner:
            return False
        related = self.relatives((function.module.name, function.owner))
        shared = related & set(self._methods[function.node.name])
        return len(shared) > 1 or any(name == "Protocol" for _, name in related)


def _known(function: Function | None) -> list[Function]:
    return [function] if function else []


def _last_name(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _last_name(value)
    return None


def _reference(module: Module, node: ast.AST, caller: Function | None) -> Reference:
    parent = module.parents[node]
    called = isinstance(parent, ast.Call) and parent.func is node
    statement: list[ast.AST] = []
    for each in module.around(node):
        if isinstance(each, ast.stmt):
            break
        statement.append(each)
    in_expression = any(isinstance(each, _IN_EXPRESSION) for each in statement)
    awaited = called and isinstance(module.parents[parent], ast.Await)
    return Reference(module.file, getattr(node, "lineno", 0), caller, called, awaited, in_expression)


def read_package(repository: Path, package: str) -> Package:
    """Read and resolve every Python file below a package's folder."""
    return Package([*_modules(repository, package)])


def _modules(repository: Path, folder: str) -> Iterator[Module]:
    for path in sorted((repository / folder).rglob("*.py")):
        relative = path.relative_to(repository)
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        yield Module(relative.as_posix(), name, path.read_text())


@dataclass(frozen=True)
class Named:
    """Private names that tests and tools use: with the module they come from, where it is seen, or alone."""

    of_module: frozenset[Key]
    alone: frozenset[str]

    def names(self, function: Function) -> bool:
        return function.node.name in self.alone or (function.module.name, function.node.name) in self.of_module


def read_named(repository: Path, folders: Iterable[str]) -> Named:
    """Find the private names that the files of some folders import, take as attributes or write in strings."""
    of_module: set[Key] = set()
    alone: set[str] = set()
    for module in (each for folder in folders for each in _modules(repository, folder)):
        of_module |= {key for key in module.imports.values() if key[1].startswith("_")}
        for node in ast.walk(module.tree):
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    pass
                case ast.Attribute(value=ast.Name(id=base), attr=name) if base in module.imports:
                    of_module.add((".".join(module.imports[base]), name))
                    alone |= {name} if module.imports[base][1][:1].isupper() else set()
                case ast.Attribute(attr=name) if name.startswith("_"):
                    alone.add(name)
                case ast.Constant(value=str(text)):
                    alone |= set(_PRIVATE.findall(text))
    return Named(frozenset(of_module), frozenset(alone))


def why_apart(package: Package, function: Function, named: Named) -> str:
    """Give the reason why a function with one reference is not counted; empty where it could be inlined."""
    [use] = function.references
    deferred = isinstance(function.node, ast.AsyncFunctionDef) and not use.awaited
    reasons: Mapping[str, bool] = {
        "named by tests or tools": named.names(function),
        "decorated": bool(function.node.decorator_list),
        "generator": any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function.node)),
        "callback": not use.called or deferred,
        "recursive": function.recursive,
        "overridden or of a protocol": package.shares_its_name(function),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def what_hinders(function: Function, most_lines: int, most_complex: int) -> str:
    """Describe what inlining a function into its caller would exceed or have to turn; empty where nothing."""
    [use] = function.references
    notes: list[str] = []
    if use.caller is not None:
        lines, complexity = use.caller.lines + function.body_lines - 1, use.caller.complexity + function.complexity - 1
        notes += [f"{lines} lines"] if lines > most_lines else []
        notes += [f"complexity {complexity}"] if complexity > most_complex else []
    else:
        notes.append("called at module level")
    returns = [node for node in _own_nodes(function.node) if isinstance(node, ast.Return)]
    notes += ["early return"] if any(each is not function.node.body[-1] for each in returns) else []
    notes += ["several lines in an expression"] if use.in_expression and function.body_lines > 1 else []
    return ", ".join(notes)


def _own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """Walk a function's body without the functions and classes inside it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)
