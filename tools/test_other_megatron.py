"""Run the tests of Megatron itself, up to three ranks, against another megatron-core than the installed one.

    python tools/test_other_megatron.py 0.19.2

Fetches that version's wheel with pip and puts its Python files in front of the installed ones. Its compiled helper is
for another Python where the versions differ; megasharp does not use it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Other files of tests/multirank are about methods, cuts of a step and how ranks start, which no version changes.
FILES = (
    "async_checkpoint",
    "chunked_head",
    "combined",
    "context",
    "conversion",
    "data_only",
    "experts",
    "hf_parity",
    "learner",
    "lora",
    "optimizer_offload",
    "optimizer_offload_places",
    "overlap",
    "plan",
    "recompute_modules",
    "replicas",
    "state",
    "transformer_engine",
    "virtual_stages",
)
_MORE_RANKS = "not [4 and not [6 and not tp2pp2"


def fetch(version: str, folder: Path) -> Path:
    """Unpack the wheel of megatron-core `version` (built for Python 3.12) below `folder`; returns its root."""
    platforms = [option for tag in ("24", "28") for option in ("--platform", f"manylinux_2_{tag}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", *platforms, "-d", str(folder), f"megatron-core=={version}"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def main(version: str) -> int:
    """Run FILES of tests/multirank/learner with that version first on the path; returns pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        root = fetch(version, Path(folder))
        environment = {**os.environ, "PYTHONPATH": str(root)}
        seen = subprocess.run(
            [sys.executable, "-c", "import megatron.core; print(megatron.core.__version__)"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        if seen.stdout.split()[-1] != version:
            sys.exit(f"expected megatron-core {version} on the path, found {seen.stdout.strip()}")
        print(f"megatron-core {version}")
        tests = [str(REPOSITORY / "tests" / "multirank" / "learner" / f"test_{name}.py") for name in FILES]
        command = [sys.executable, "-m", "pytest", *tests, "-k", _MORE_RANKS]
        return subprocess.run(command, env=environment, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
