"""Imports go down only, and each package uses only the libraries that it may."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

from megasharp.tasks.table import make_verifiers

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "megasharp"

# What a package may import besides the standard library and megasharp. A new package gets a line here.
LIBRARIES = {
    "algos": {"torch", "pydantic"},
    "batching": {"torch"},
    "checkpoint": {"pydantic", "torch", "pyarrow"},
    "cli": {"typer", "rich"},
    "cluster/ray_runtime": {"torch", "ray", "numpy", "psutil"},
    "cluster/slurm": {"psutil", "pynvml", "torch"},
    "common": {"torch", "numpy", "pydantic", "transformers"},
    "config": {"torch", "pydantic", "pydantic_core", "yaml", "huggingface_hub"},
    "convert": {"torch", "transformers", "safetensors", "tokenizers", "pydantic"},
    "evals": {"torch", "numpy", "pydantic", "pandas", "pyarrow"},
    "jobs": set(),
    "learner": {"pydantic", "torch", "megatron", "transformer_engine", "flash_attn", "apex", "transformers"},
    "learner/ranks": {"torch"},
    "metrics": {
        *("torch", "numpy", "pandas", "pyarrow", "psutil", "pydantic_core", "rich"),
        *("tensorboard", "wandb", "mlflow"),
    },
    "ops": {"torch", "triton"},
    "planner": set(),
    "reporting": {"matplotlib", "numpy", "pandas", "pyarrow", "rich", "pydantic"},
    "rollout": {"torch", "transformers", "safetensors"},
    "rollout/sglang": {"torch"},
    "rollout/sglang/client": {"torch"},
    "rollout/sglang/engine": {"torch", "sglang", "transformers", "fastapi", "msgspec"},
    "studies": {"pydantic", "torch", "numpy", "pandas", "matplotlib", "rich", "transformers"},
    "tasks": {
        *("pydantic", "torch", "transformers", "tokenizers", "datasets", "huggingface_hub", "pyarrow"),
        *("math_verify", "sympy", "reasoning_gym", "langdetect"),
    },
    "tasks/environments": {"pydantic", "gymnasium", "websockets", "verifiers", "httpx"},
    "tasks/sandbox": set(),
    "trainer": {"torch", "rich"},
    "weight_sync": {"torch", "safetensors"},
    ".": set(),
}
LIGHT = (
    *("algos", "batching", "tasks", "tasks/environments", "tasks/sandbox", "config", "ops", "convert", "planner"),
    *("rollout", "rollout/sglang", "rollout/sglang/client"),
)
# The files that many processes live on: each imports the standard library alone.
BARE = (
    *("errors", "files", "signals", "stack_dumps", "watchdog", "supervisor"),
    *("exit_codes", "formats", "group_environment", "output", "parent_death", "terminal"),
)
# The process that judging workers are forked from imports its program and the pickled factory of verifiers.
WORKERS_PARENT = ("megasharp.tasks.sandbox.worker", "megasharp.tasks.table", "megasharp.tasks.sandbox.bubblewrap")
NOT_IN_WORKERS_PARENT = (
    *("torch", "numpy", "transformers", "tokenizers", "pyarrow", "datasets", "megatron"),
    *("sympy", "math_verify", "reasoning_gym", "langdetect"),
)
HEAVY = ("megatron", "sglang", "ray", "transformer_engine")


def test_imports_go_down_only() -> None:
    """In a process of its own: the linter's console keeps pytest's captured output, which is closed by then."""
    program = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def package_of(file: Path) -> str:
    """The innermost folder that `LIBRARIES` names: the two halves of the fleet run in two Pythons."""
    folder = file.relative_to(PACKAGE).parent
    return next(str(each) for each in (folder, *folder.parents) if str(each) in LIBRARIES)


def libraries_of(file: Path) -> set[str]:
    """Third-party top-level names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"megasharp"}


def test_packages_use_only_their_libraries() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert {package_of(file) for file in files} == LIBRARIES.keys(), "packages that came or went"
    for file in files:
        extra = libraries_of(file) - LIBRARIES[package_of(file)]
        assert not extra, f"{file.relative_to(REPOSITORY)} imports {sorted(extra)}"


def test_light_packages_load_nothing_heavy() -> None:
    """In a process of its own, with every module of those packages."""
    assert set(LIGHT) <= LIBRARIES.keys(), "a package that is gone"
    modules = [
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted(PACKAGE.rglob("*.py"))
        if package_of(file) in LIGHT
    ]
    assert len(modules) > 20
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*sorted({{m.split('.')[0] for m in sys.modules}} & {set(HEAVY)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", BARE)
def test_files_that_processes_live_on_need_the_standard_library_alone(name: str) -> None:
    assert libraries_of(PACKAGE / "common" / f"{name}.py") == set()


def test_the_parent_of_workers_imports_no_data_libraries_and_only_the_algebra_that_is_asked_for() -> None:
    script = (
        "import importlib, pickle, sys\n"
        f"for name in {WORKERS_PARENT!r}: importlib.import_module(name)\n"
        "make = pickle.loads(sys.stdin.buffer.read())\n"
        "make()\n"
        f"print(*sorted({{m.split('.')[0] for m in sys.modules}} & {set(NOT_IN_WORKERS_PARENT)!r}))\n"
        "make({'math'}, preload=True)\n"
        "print('sympy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(make_verifiers),
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == ["", "True"]
