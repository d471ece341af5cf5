"""The house's walls: imports go down only, and each room uses only the libraries that it may."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports
from waiting import HANG_S

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "megasharp"

# What a room may import besides the standard library and megasharp. A new room gets a line here.
LIBRARIES = {
    "algos": {"torch", "pydantic"},
    "batching": {"torch"},
    "build": {"torch", "rich"},
    "checkpoint": {"pydantic", "torch", "pyarrow"},
    "cluster": {"torch", "ray", "numpy", "psutil"},
    "config": {"torch", "pydantic", "pydantic_core", "yaml"},
    "convert": {"torch", "transformers", "safetensors", "tokenizers", "pydantic"},
    "data": {"pydantic", "torch", "transformers", "tokenizers", "datasets", "huggingface_hub", "pyarrow"},
    "evals": {"torch", "numpy", "pydantic", "pandas", "pyarrow"},
    "jobs": {"psutil", "pynvml", "torch"},
    "labs": {"torch", "numpy", "pandas", "matplotlib", "rich", "transformers"},
    "mcore": {"pydantic", "torch", "megatron", "transformer_engine", "apex", "transformers"},
    "metrics": {"torch", "numpy", "pandas", "pyarrow", "psutil", "rich", "tensorboard", "wandb", "mlflow"},
    "ops": {"torch", "triton"},
    "plan": set(),
    "prolonged": set(),
    "ranks": {"torch"},
    "report": {"matplotlib", "numpy", "pandas", "pyarrow", "rich"},
    "rewards": {"math_verify", "sympy", "reasoning_gym"},
    "runs": {"pydantic", "rich"},
    "rollout": {"torch", "transformers", "safetensors"},
    "sandbox": set(),
    "sweeps": {"pydantic", "numpy", "pandas", "matplotlib"},
    "serving": {"torch"},
    "serving/client": {"torch"},
    "serving/engine": {"torch", "sglang", "transformers", "fastapi", "msgspec"},
    "sync": {"torch", "safetensors"},
    "cli": {"typer", "rich"},
    "command": set(),
    "deterministic": {"torch"},
    "errors": set(),
    "files": set(),
    "generators": {"torch", "numpy"},
    "loop": {"torch"},
    "orphans": set(),
    "protocols": {"torch"},
    "scratch": set(),
    "signals": set(),
    "stacks": set(),
    "supervisor": set(),
    "watchdog": set(),
    "types": {"torch"},
    "__init__": set(),
}
LIGHT = (
    "algos",
    "batching",
    "rewards",
    "data",
    "config",
    "ops",
    "types",
    "convert",
    "plan",
    "prolonged",
    "rollout",
    "sandbox",
    "serving",
    "serving/client",
)
HEAVY = ("megatron", "sglang", "ray", "transformer_engine")


def test_imports_go_down_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    status = lint_imports(config_filename=str(REPOSITORY / ".importlinter"), no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def room_of(file: Path) -> str:
    """A top-level folder or module; the two halves of `serving` are rooms of their own: they run in two Pythons."""
    parts = file.relative_to(PACKAGE).parts
    half = len(parts) > 2 and parts[0] == "serving"
    return "/".join(parts[:2]) if half else parts[0].removesuffix(".py")


def libraries_of(file: Path) -> set[str]:
    """Third-party top-level names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"megasharp"}


def test_rooms_use_only_their_libraries() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert {room_of(file) for file in files} <= LIBRARIES.keys(), "a new room: say here what it may import"
    for file in files:
        extra = libraries_of(file) - LIBRARIES[room_of(file)]
        assert not extra, f"{file.relative_to(REPOSITORY)} imports {sorted(extra)}"


def test_light_rooms_load_nothing_heavy() -> None:
    """In a process of its own, with every module of those rooms."""
    modules = [
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted(PACKAGE.rglob("*.py"))
        if room_of(file) in LIGHT
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
