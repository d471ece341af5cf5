"""Seconds from the start of each command to its first byte on a terminal.

    python tools/first_output.py --rounds 3
    python tools/first_output.py --rounds 1 --cold

Each command runs on a terminal of its own in a temporary folder that holds the quickstart and a run of one step, and is
ended once it has written something. The smallest figure of the rounds counts, because other work on the machine only
adds to it; `--cold` first drops the files of this Python from the page cache, but for those
that another process maps. CPU seconds are those of the process up
to its first byte. Exit code 1: a command took more than `--limit` seconds in every round.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MEGASHARP = (sys.executable, "-m", "megasharp.cli")
HELD_S = 120.0
COMMANDS = (
    "quickstart --out other",
    *("train q/run.yaml name=new", "train q/run.yaml --dry-run", "train q/run.yaml name=new --retries 1"),
    *("eval runs/quickstart --suite countdown_dev --n 1", "eval --compare a.json b.json"),
    *("plan q/run.yaml", "plan q/run.yaml --json", "submit q/run.yaml --dry-run", "sweep q/sweep.yaml --dry-run"),
    *("probe quickstart", "report quickstart", "report quickstart --serve --port 0", "doctor", "doctor q/run.yaml"),
    *("runs list", "runs show quickstart", "runs compare quickstart second"),
    *("convert hf-to-megatron q/base converted", "convert megatron-to-hf runs/quickstart/checkpoints/step_000001 hf"),
    *("convert megatron-to-peft runs/quickstart/checkpoints/step_000001 peft", "convert verify q/base q/base"),
    *("methods", "methods casp", "config", "config policy.tp", "toy", "toy squeeze"),
    *("data list", "data show q/run.yaml", "data show q/data/train.jsonl --task countdown"),
)
NAMES = (
    *(
        "quickstart",
        "train",
        "eval",
        "plan",
        "submit",
        "sweep",
        "probe",
        "report",
        "doctor",
        "methods",
        "config",
        "toy",
    ),
    *("data", "data list", "data show", "data decontaminate", "runs", "runs list", "runs show", "runs compare"),
    *("convert", "convert hf-to-megatron", "convert megatron-to-hf", "convert megatron-to-peft", "convert verify"),
)


def first_byte(words: list[str], folder: Path) -> tuple[float, float, str]:
    """Run `megasharp` with `words` until it writes; return its seconds, its CPU seconds and the line it began."""
    began = time.monotonic()
    child, terminal = pty.fork()
    if not child:
        os.chdir(folder)
        os.execv(MEGASHARP[0], [*MEGASHARP, *words])
    try:
        if not select.select([terminal], [], [], HELD_S)[0]:
            return HELD_S, HELD_S, "nothing"
        seconds = time.monotonic() - began
        fields = Path(f"/proc/{child}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        cpu = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
        return seconds, cpu, plain(os.read(terminal, 4096))
    finally:
        # The child leads a session of its own, with what it has started.
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def plain(data: bytes) -> str:
    """Return the first line with anything on it, without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", data.decode(errors="replace"))
    return next((line.strip() for line in text.splitlines() if line.strip()), "nothing")


def drop_from_cache() -> None:
    """Drop the files of this Python's libraries from the page cache."""
    for root in {Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib"}:
        for path in root.rglob("*"):
            if path.is_file() and not path.is_symlink():
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)


def prepare(folder: Path) -> None:
    """Write the quickstart into `folder`, a sweep of it, and two runs of one step."""

    def run(*words: str) -> None:
        subprocess.run([*MEGASHARP, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)

    run("quickstart", "--out", "q")
    small = ("steps=1", "data.prompts_per_step=2", "data.responses_per_prompt=2", "eval.suites=[]")
    for name in ("quickstart", "second"):
        run("train", "q/run.yaml", f"name={name}", *small)
    (folder / "q" / "sweep.yaml").write_text("name: s\nrun: run.yaml\nseeds: [1, 2]\n", encoding="utf-8")


def main() -> None:
    """Measure, print the table, and end with 1 where a command is late."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="with an empty page cache")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds that a command may take")
    parser.add_argument("--only", default="", help="commands that begin so")
    asked = parser.parse_args()
    late = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepare(folder)
        print(f"{'seconds':>8} {'CPU':>6}  command: first line")
        for line in (*COMMANDS, "--help", *(f"{name} --help" for name in NAMES)):
            if not line.startswith(asked.only):
                continue
            found = []
            for _ in range(asked.rounds):
                if asked.cold:
                    drop_from_cache()
                found.append(first_byte(line.split(), folder))
            seconds, cpu, said = min(found)
            late += seconds > asked.limit
            print(f"{seconds:8.2f} {cpu:6.2f}  {line}: {said[:70]}", flush=True)
    sys.exit(late > 0)


if __name__ == "__main__":
    main()
