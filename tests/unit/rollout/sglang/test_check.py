"""The engines' Python is asked before anything starts; here Python programs stand in for it."""

from __future__ import annotations

import re
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megasharp.common.errors import RunFailed, UserError
from megasharp.config.rollout import RolloutConfig
from megasharp.rollout.sglang.client.health import check_engines, check_installed_engines
from megasharp.rollout.sglang.client.launch import FleetSettings


def stand_in(folder: Path, body: str) -> FleetSettings:
    """Settings whose Python is a shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return FleetSettings(python, folder, folder / "logs", RolloutConfig(sglang={"page_size": 16}))


def test_what_passes(tmp_path: Path) -> None:
    check_engines(stand_in(tmp_path, f'[ "$3" = --check ] && cp "$4" {tmp_path}/seen.json'), "run.yaml")
    assert '"page_size": 16' in (tmp_path / "seen.json").read_text()


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("sglang.page_sise is no flag", "rollout.sglang.page_sise is no flag"),
        ("sglang.a (3) must be a multiple of sglang.b", "rollout.sglang.a (3) must be a multiple of rollout.sglang.b"),
        ("/x/sglang.d is no model", "/x/sglang.d is no model"),
        (
            "sglang.tp_size is set by the engine's key tp; leave it out",
            "rollout.sglang.tp_size is set by rollout.tp; leave it out",
        ),
        (
            "sglang.host is set by the engine's key host; leave it out",
            "rollout.sglang.host is set by the run; leave it out",
        ),
    ],
)
def test_the_engines_reason_names_the_runs_keys(tmp_path: Path, said: str, read: str) -> None:
    settings = stand_in(tmp_path, f'echo "a warning" >&2; echo "error: {said}" >&2; exit 2')
    with pytest.raises(UserError, match=f"^{re.escape(f'run.yaml: {read}')}$"):
        check_engines(settings, "run.yaml")


def test_a_python_without_our_package(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^rollout\.python: .*No module named 'x'.*make fleet"):
        check_engines(stand_in(tmp_path, "echo \"No module named 'x'\" >&2; exit 1"), "run.yaml")


def test_a_check_that_something_kills_may_end_well_the_next_time(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="was ended by signal 9"):
        check_engines(stand_in(tmp_path, "kill -9 $$"), "run.yaml")


def test_a_python_for_gpus_is_built_otherwise(tmp_path: Path) -> None:
    missing = FleetSettings(python=tmp_path / "nowhere", model=tmp_path, log_folder=tmp_path, device="cuda")
    with pytest.raises(UserError, match=r"build the engines' Python with `make gpu`"):
        check_engines(missing, "run.yaml")


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist; build the engines' Python with `make fleet`"):
        check_engines(FleetSettings(python=tmp_path / "nowhere", model=tmp_path, log_folder=tmp_path), "run.yaml")


def test_a_python_that_cannot_be_started_is_a_users_mistake(tmp_path: Path) -> None:
    settings = stand_in(tmp_path, "exit 0")
    settings.python.chmod(0o600)
    with pytest.raises(UserError, match=r"^rollout\.python: .*: it does not run \(Permission denied\)$"):
        check_installed_engines(settings)


def test_what_lies_where_the_user_is_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's own Python comes as far as SGLang, which it lacks."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "megasharp").mkdir()
    for name in ("megasharp/__init__.py", "json.py", "dataclasses.py"):
        (tmp_path / name).write_text("raise SystemExit('a module of the folder where the user is')")
    monkeypatch.chdir(tmp_path)
    settings = FleetSettings(python=Path(sys.executable), model=tmp_path, log_folder=tmp_path)
    with pytest.raises(
        UserError, match=r"^rollout\.python: .*: the engines' Python has no sglang; megasharp needs exactly"
    ) as told:
        check_engines(settings, "run.yaml")
    assert str(told.value).count("make fleet") == 1


def test_one_that_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exit code 3"):
        check_engines(stand_in(tmp_path, "exit 3"), "run.yaml")


def packages(folder: Path, cuda: str | None, *names: str) -> FleetSettings:
    """The trainer's own Python with records of packages that stand in for those of an engines' Python on GPUs."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (folder / "torch" / "version.py").write_text(f"__version__ = '2.11.0'\ncuda = {cuda!r}\n")
    for name in names:
        record = folder / f"{name.replace('-', '_')}-0.5.21.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.5.21\n")
    body = f'PYTHONPATH={folder}:{Path(__file__).parents[4]} exec {sys.executable} "$@"'
    return replace(stand_in(folder, body), device="cuda")


def test_packages_for_gpus_pass_where_no_gpu_is(tmp_path: Path) -> None:
    """On a login node, with CUDA's torch, which is not imported."""
    check_installed_engines(packages(tmp_path, "13.0", "sglang", "sglang-kernel"))


@pytest.mark.parametrize(
    ("cuda", "names", "words"),
    [
        (None, ("sglang", "sglang-kernel"), "torch 2.11.0, which knows no CUDA; `make gpu`"),
        ("13.0", ("sglang",), "lacks sglang-kernel, without which SGLang has no GPU; `make gpu`"),
    ],
)
def test_packages_for_another_device_are_refused(
    cuda: str | None, names: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    settings = packages(tmp_path, cuda, *names)
    with pytest.raises(UserError, match=f"^rollout.python: {tmp_path}/python: the engines' Python .*{words}"):
        check_installed_engines(settings)
