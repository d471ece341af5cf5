"""All that megasharp uses from inside SGLang is there in the installed version; what to look at before another one."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import PYTHON
from used_of_sglang import ENGINE, REPLACED, imports

pytestmark = pytest.mark.long("fleet")

REPOSITORY = Path(__file__).parents[2]
# The files that import SGLang: a new one belongs here, and in the table of docs/explanation/sglang.md.
IMPORTERS = {"sglang_internals.py", "arguments.py", "cpu_platform.py"}
# Classes of ours whose methods stand in for those of SGLang's class.
SUBCLASSES = {"EngineSampler": "Sampler", "PlainCpuPlatform": "SRTPlatform"}
SUBCLASSES |= {"PlainPagedAllocator": "PagedTokenToKVPoolAllocator", "PromptCache": "RadixCache"}
SUBCLASSES |= {"WindowBudget": "SWAPrefillBudget", "WindowAllocator": "SWATokenToKVPoolAllocator"}
# Called with the parameters that REPLACED gives, and left as it is.
CALLED = {"_build_hybrid_swa_kv_pool"}


def test_the_installed_sglang_has_all_that_we_use() -> None:
    script = REPOSITORY / "tests" / "fleet" / "used_of_sglang.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(PYTHON), str(script)], capture_output=True, text=True, env=environment, check=False)
    problems = [line for line in done.stdout.splitlines() if line.startswith("sglang ")]
    assert not problems, "docs/explanation/sglang.md, Seams, says which file uses what:\n" + "\n".join(problems)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_file_that_imports_sglang_is_known() -> None:
    assert {file for file, _, _ in imports()} == IMPORTERS
    readme = (REPOSITORY / "docs" / "explanation" / "sglang.md").read_text(encoding="utf-8")
    seams = readme.split("## Seams")[1].split("\n## ")[0]
    using = {file.name for file in ENGINE.rglob("*.py") if "sglang_internals" in file.read_text(encoding="utf-8")} - {
        "__init__.py"
    }
    assert [name for name in sorted(IMPORTERS | using) if f"`{name}`" not in seams] == []


def test_every_replaced_method_is_listed() -> None:
    listed = {name for methods in REPLACED.values() for name in methods}
    files = ("sglang_patches.py", "server_patches.py", "forking.py", "memory_pool.py")
    assert {name for file in files for name in assigned(file)} == listed - overridden() - CALLED
    assert overridden() <= listed


def assigned(file: str) -> Iterator[str]:
    """Names that a file of changes sets on SGLang's classes, by assignment or through its tables for setattr."""
    for node in ast.walk(ast.parse((ENGINE / file).read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                if target.value.id not in ("self", "copied", "call", "request") and "megasharp" not in target.attr:
                    yield target.attr
            elif isinstance(target, ast.Name) and target.id in ("_UPDATES", "_READS"):
                yield from ast.literal_eval(node.value)


def overridden() -> set[str]:
    """Methods of REPLACED that a class of ours has in place of SGLang's."""
    found = {"forward", "load_weights"}
    for file in ("sampler.py", "cpu_platform.py", "memory_pool.py"):
        for node in ast.walk(ast.parse((ENGINE / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in SUBCLASSES:
                known = REPLACED[SUBCLASSES[node.name]]
                ours = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                found |= ours & known.keys()
                assert ours - known.keys() <= {"__init__", "_log_probs", "still_to_fill"}, ours
    return found
