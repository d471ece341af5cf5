"""Check a built wheel: install it where there is no repository, and use it in an empty folder.

    python tools/check_wheel.py dist/megasharp-0.2.0-py3-none-any.whl

`make wheel` builds the wheel and runs this program. Dependencies are those of the Python that runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from megasharp import __version__

REPOSITORY = Path(__file__).resolve().parents[1]
PLANNED = """\
include: [algo/casp.yaml, configs/cluster/cpu-tp2-pp2.yaml]
name: away
steps: 2
model: {path: examples/quickstart/base}
data: {task: countdown, path: examples/quickstart/data/train.jsonl, max_prompt_tokens: 16, max_response_tokens: 20}
"""
SMALL = (
    *("steps=2", "data.prompts_per_step=8", "eval.every=0", "eval.at_start=false"),
    *("eval.suites=[countdown_test]", "eval.n=1", "eval.k=[1]", "log.tensorboard=false"),
)
LOCATED = "import sys, megasharp; print(megasharp.__file__, *sys.path, *map(repr, sys.meta_path), sep='\\n')"
# Prints the suites that are found, each with the data that its file names; fails where that data is not there.
SUITES = """\
from megasharp.config.core import SHIPPED
from megasharp.evals.suites import SUITE_FOLDER, suite_source
for path in sorted((SHIPPED / SUITE_FOLDER).glob("*.yaml")):
    print(path.name, suite_source(path.stem)[1])
"""
TESTED = "from megasharp.config.core import SHIPPED; print((SHIPPED / 'constraints.txt').read_text(), end='')"


# Without what would lead a Python back to the repository.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
    "OMP_NUM_THREADS": "1",
}


class Failed(Exception):
    """The wheel does not do what it should; the message says what was seen."""


def install(wheel: Path, folder: Path) -> Path:
    """Install `wheel` alone into a new environment in `folder`; returns its `bin`.

    A .pth adds the running interpreter's packages to its path. Python reads no .pth in a folder that a .pth names, so
    the finder of an editable installation does not come along.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    [packages] = (folder / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    options = ["-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "install", *options, str(wheel)], env=ENVIRONMENT, check=True)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


class Away:
    """Programs of the environment whose `bin` is `program`, run in the folder `cwd`."""

    def __init__(self, program: Path, cwd: Path) -> None:
        self.program = program
        self.cwd = cwd

    def __call__(self, name: str, *arguments: str) -> str:
        """Run one and return its standard output. Raises Failed where its exit code is not 0."""
        command = [str(self.program / name), *arguments]
        done = subprocess.run(command, cwd=self.cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"{name} {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout


def check_package(away: Away) -> None:
    """Check that the wheel is what runs, not the checkout, and that it has its version and the tested versions."""
    file, *seen = away("python", "-c", LOCATED).splitlines()
    expect(Path(file).is_relative_to(away.program.parent), f"megasharp is imported from {file}")
    expect(str(REPOSITORY) not in seen, f"{REPOSITORY} is on the path")
    expect(not any("editable" in each for each in seen), "an editable installation is seen")
    expect(away("megasharp", "--version") == f"megasharp {__version__}\n", "megasharp --version")
    pins = (REPOSITORY / "constraints.txt").read_text()
    expect(away("python", "-c", TESTED) == pins, "the versions that `doctor` compares with")


def check_presets(away: Away) -> None:
    """Check that methods, presets and the quickstart's files are found."""
    expect("casp" in away("megasharp", "methods"), "megasharp methods")
    (away.cwd / "run.yaml").write_text(PLANNED)
    planned = away("megasharp", "plan", "run.yaml")
    expect("tp 2 x pp 2" in planned and "grpo, casp" in planned, f"megasharp plan of presets: {planned}")


def check_suites(away: Away) -> None:
    """Check that every suite of the repository is found, with the data that its file names."""
    found = [line.split()[0] for line in away("python", "-c", SUITES).splitlines()]
    there = sorted(path.name for path in (REPOSITORY / "configs" / "task").glob("*.yaml"))
    expect(found == there, f"suites: {', '.join(sorted({*there} ^ {*found}))}")


def check_quickstart(away: Away) -> None:
    """Check that the quickstart that is written out trains, on its own folder's model and data, and is reported."""
    *_, last = away("megasharp", "quickstart", "--out", "first").splitlines()
    expect(last == "next: megasharp train first/run.yaml", last)
    away("megasharp", "train", "first/run.yaml", *SMALL)
    run = away.cwd / "runs" / "quickstart"
    expect((run / "metrics.jsonl").is_file(), "metrics.jsonl of the quickstart")
    expect(f"path: {away.cwd}/first/base\n" in (run / "config.yaml").read_text(), "the model is the folder's own")
    away("megasharp", "report", "quickstart")
    expect(bool([*run.rglob("*.html")]), "the page of megasharp report")


def expect(holds: bool, what: str) -> None:
    """Raise Failed with `what` unless it holds."""
    if not holds:
        raise Failed(what)


def main(arguments: Sequence[str]) -> int:
    """Check the wheel that the command line names; returns 0 where all is as it should be."""
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        sys.exit(f"expected the path of one wheel, not {' '.join(arguments) or 'nothing'}: run make wheel")
    wheel = Path(arguments[0]).resolve()
    with tempfile.TemporaryDirectory(prefix="megasharp-wheel-") as folder:
        # Resolved, as the runs in it will name it.
        root = Path(folder).resolve()
        (root / "empty").mkdir()
        away = Away(install(wheel, root / "environment"), root / "empty")
        for check in (check_package, check_presets, check_suites, check_quickstart):
            try:
                check(away)
            except Failed as error:
                print(f"{wheel.name}: {check.__name__}: {error}")
                return 1
    print(f"{wheel.name}: installed alone, it finds its presets and suites, and trains and reports the quickstart")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
