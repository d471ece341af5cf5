"""The wheel alone: built, installed where there is no repository, and used in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from quickstart import REPOSITORY, SMALL
from waiting import HANG_S

from megasharp import __version__

# What a wheel is made from; a copy of it, so that no build leaves folders in the repository.
SOURCES = (
    *("megasharp", "configs", "examples/quickstart"),
    *("pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"),
)
PLANNED = """\
include: [algo/casp.yaml, configs/cluster/cpu-tp2-pp2.yaml]
name: away
steps: 2
model: {path: examples/quickstart/base}
data: {task: countdown, path: examples/quickstart/data/train.jsonl, max_prompt_tokens: 16, max_response_tokens: 20}
"""

Away = Callable[..., str]


def copy_sources(target: Path) -> None:
    """Copy what a wheel is made from into the folder `target`."""
    for name in SOURCES:
        source = REPOSITORY / name
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)


def build_wheel(folder: Path) -> Path:
    """Build the wheel below `folder`, with the running interpreter's setuptools."""
    copy_sources(folder / "source")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder / "wheels")]
    pip(sys.executable, "wheel", *options, str(folder / "source"))
    [wheel] = (folder / "wheels").glob("megasharp-*.whl")
    return wheel


def pip(python: str, *arguments: str) -> None:
    """Run pip with the Python given, quietly."""
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments, "-q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr


def clean_environment() -> dict[str, str]:
    """The environment without what would lead Python back to the repository."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def install(wheel: Path, folder: Path) -> Path:
    """Install `wheel` alone into a new environment in `folder`; returns its `bin`.

    A .pth adds the running interpreter's packages to its path. Of a folder that a .pth names Python reads no .pth, so
    an editable installation's finder does not come along.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    [packages] = (folder / "lib").glob("python*/site-packages")
    options = ["install", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    pip(sys.executable, "--python", str(python), *options)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment in which only the wheel of this checkout is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    return install(build_wheel(folder), folder / "environment")


@pytest.fixture
def away(program: Path, tmp_path: Path) -> Away:
    """Runs a program of that environment in an empty folder; returns standard output."""

    def run(name: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(program / name), *arguments],
            cwd=tmp_path,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.long("runs")
def test_the_wheel_is_what_runs(away: Away, program: Path) -> None:
    """Neither the checkout nor its editable installation is seen."""
    look = "import sys, megasharp; print(megasharp.__file__, *sys.path, *map(repr, sys.meta_path), sep='\\n')"
    file, *seen = away("python", "-c", look).splitlines()
    assert Path(file).is_relative_to(program.parent)
    assert str(REPOSITORY) not in seen and not any("editable" in each for each in seen)
    assert away("megasharp", "--version") == f"megasharp {__version__}\n"
    tested = "from megasharp.config.core import SHIPPED; print((SHIPPED / 'constraints.txt').read_text(), end='')"
    assert away("python", "-c", tested) == (REPOSITORY / "constraints.txt").read_text(), "what `doctor` compares with"


@pytest.mark.long("runs")
def test_methods_and_presets_are_found_away_from_the_repository(away: Away, tmp_path: Path) -> None:
    assert "casp" in away("megasharp", "methods")
    (tmp_path / "run.yaml").write_text(PLANNED)
    planned = away("megasharp", "plan", "run.yaml")
    assert "tp 2 x pp 2" in planned and "grpo, casp" in planned


@pytest.mark.long("runs")
def test_the_quickstart_trains_away_from_the_repository(away: Away, tmp_path: Path) -> None:
    """Its model and its data are those of the folder that it wrote; its suite is shipped."""
    *_, last = away("megasharp", "quickstart").splitlines()
    assert last == "next: megasharp train quickstart/run.yaml"
    keys = ["steps=2", *SMALL, "eval.suites=[countdown_test]", "eval.n=1", "eval.k=[1]", "eval.at_start=false"]
    away("megasharp", "train", "quickstart/run.yaml", *keys)
    run = tmp_path / "runs" / "quickstart"
    assert (run / "metrics.jsonl").is_file()
    assert f"path: {tmp_path}/quickstart/base\n" in (run / "config.yaml").read_text()
