"""Each of a run's processes imports what it needs and no more: decision 0002 has the reasons.

Imports are followed through the package's files as they are written, at module level, because not every process can be
started here: SGLang's run in a Python of their own.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from waiting import HANG_S

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "megasharp"
# A process: the modules that it starts with, and the packages that stay away from it, ours or others'.
PROCESSES = {
    "the command line before a command runs": (
        ("cli.main", "cli.__main__"),
        ("torch", "pydantic", "numpy", "yaml", "megasharp.trainer", "megasharp.config"),
    ),
    "train --retries": (
        ("common.supervisor", "common.watchdog", "config.core"),
        ("torch", "numpy", "matplotlib", "megatron", "ray"),
    ),
    "runs show, list and compare": (
        ("reporting.history", "reporting.show"),
        ("torch", "numpy", "matplotlib", "megatron", "ray", "sglang"),
    ),
    "plan and train --dry-run": (
        ("trainer.plan", "trainer.resolve.resolved_run", "trainer.resolve.summary"),
        (
            *("megatron", "sglang", "ray", "matplotlib", "torch._dynamo", "megasharp.learner"),
            *("megasharp.trainer.placement", "megasharp.trainer.factories"),
        ),
    ),
    "the planner's counting program": (
        ("learner.meta_program",),
        ("sglang", "ray", "pydantic", "megasharp.trainer", "megasharp.rollout", "megasharp.cluster"),
    ),
    "SGLang's processes": (
        (
            *("rollout.sglang.engine.__main__", "rollout.sglang.engine.server", "rollout.sglang.engine.sglang_patches"),
            *("rollout.sglang.engine.server_patches", "rollout.sglang.engine.models.with_memory"),
            *("rollout.sglang.engine.check", "rollout.sglang.engine.cpu_platform"),
        ),
        (
            *("pydantic", "yaml", "ray", "megatron", "triton", "megasharp.config", "megasharp.learner"),
            *("megasharp.trainer", "megasharp.rollout.sglang.client", "megasharp.rollout.inprocess", "megasharp.tasks"),
        ),
    ),
    "the child that becomes an engine": (("rollout.sglang.client.child",), ("megasharp", "torch", "sglang")),
    "the text that runs in a sandbox": (("tasks.sandbox.inside",), ("megasharp", "torch", "psutil")),
    "a node of a Slurm job": (("cluster.slurm.node", "jobs.node"), ("torch", "ray", "pydantic")),
    "a tracker": (("metrics.trackers.follow",), ("torch", "pandas", "megatron", "wandb", "mlflow")),
}


def file_of(module: str) -> Path | None:
    """The file of `a.b` below the package, or None where it is a name inside of a module."""
    place = PACKAGE.joinpath(*module.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def at_module_level(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when a module is imported, without those for type checking."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from at_module_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from at_module_level([*node.body, *node.orelse, *node.finalbody])


def imported_by(file: Path) -> set[str]:
    """Every module that a file names in imports, with the packages around it."""
    names: set[str] = set()
    for node in at_module_level(ast.parse(file.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 2)}


def closure(modules: tuple[str, ...]) -> set[str]:
    """All that the modules import, through files of ours."""
    seen: set[str] = set()
    waiting = [f"megasharp.{module}" for module in modules]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        file = file_of(name.removeprefix("megasharp.")) if name.startswith("megasharp.") else None
        if file is not None:
            waiting += imported_by(file)
    return seen


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_nothing_that_must_stay_away(process: str) -> None:
    modules, away = PROCESSES[process]
    for module in modules:
        assert file_of(module) is not None, f"{module} is no file: the table is out of date"
    for name in away:
        assert not name.startswith("megasharp.") or file_of(name.removeprefix("megasharp.")), f"{name} is gone"
    found = set().union(*(closure((module,)) - {f"megasharp.{module}"} for module in modules))
    if "megasharp" not in away:
        found.discard("megasharp")
    assert sorted(found & set(away)) == []


def test_no_file_imports_itself_through_others() -> None:
    """An import of a package around the file is none: it has begun by then."""
    names = {
        ".".join(("megasharp", *file.relative_to(PACKAGE).with_suffix("").parts)): file
        for file in PACKAGE.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): imported_by(file) for name, file in names.items()}
    TopologicalSorter(
        {
            name: {m for m in found & modules.keys() if not f"{name}.".startswith(f"{m}.")}
            for name, found in modules.items()
        }
    ).prepare()


def test_sglangs_processes_share_few_files_with_the_trainer() -> None:
    modules = PROCESSES["SGLang's processes"][0]
    shared = {name for name in closure(modules) if name.startswith("megasharp.") and file_of(name[10:])}
    shared = {name for name in shared if not name.startswith("megasharp.rollout.sglang.engine")}
    packages = {"megasharp.common", "megasharp.ops", "megasharp.rollout", "megasharp.rollout.sglang"}
    assert shared - packages == {
        *(f"megasharp.common.{name}" for name in ("errors", "files", "group_environment", "records")),
        "megasharp.ops.uniform",
        *(f"megasharp.rollout.sglang.{name}" for name in ("bucket", "identity", "routed_experts", "shared_weights")),
    }


def test_a_job_that_was_submitted_before_the_move_goes_on(tmp_path: Path) -> None:
    """Slurm requeues a job with the file that it was submitted with, which names `megasharp.jobs.node`."""
    said = set()
    for module in ("megasharp.jobs.node", "megasharp.cluster.slurm.node"):
        command = [sys.executable, "-m", module, "--folder", str(tmp_path / "none")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False, timeout=HANG_S)
        said.add((done.returncode, done.stderr))
    assert len(said) == 1 and "No module named" not in said.pop()[1]
