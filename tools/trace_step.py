"""Trace one step of the quickstart in process: the files and functions of the package that it calls, and how often.

    cd $(mktemp -d) && python .../tools/trace_step.py calls.json       # [[file, line, function, inside, calls]]

Three steps are trained as examples/quickstart/run.yaml says, without checkpoints and evaluations between; each call
from the start of the second to that of the third is counted, in every thread: `inside` until `train_step` returns,
`calls` with the logging and bookkeeping that follow. The run is left in the working folder.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "megasharp"
QUICKSTART = REPOSITORY / "examples" / "quickstart"
OVERRIDES = (
    "steps=3",
    f"model.path={QUICKSTART / 'base'}",
    f"data.path={QUICKSTART / 'data' / 'train.jsonl'}",
    "checkpoint.every=1000",
    "eval.every=0",
    "eval.suites=[]",
)


class StepTrace:
    """Calls by code object: `inside` of the second step's `train_step`, and `calls` up to the start of the third."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.inside: Counter[CodeType] = Counter()
        self._step = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Count a call while the second step runs."""
        if self._step == 2 and event == "call":
            self.calls[frame.f_code] += 1

    def wrap(self, train_step: Callable[..., object]) -> Callable[..., object]:
        """Return the step with the trace told when it starts and ends."""

        def traced(*arguments: object) -> object:
            self._step += 1
            sys.setprofile(self if self._step == 2 else None)
            result = train_step(*arguments)
            if self._step == 2:
                self.inside = self.calls.copy()
            return result

        return traced

    def rows(self, package: Path) -> list[tuple[str, int, str, int, int]]:
        """List named functions of the package: file, line, qualified name, calls inside of the step, all calls."""
        return sorted(
            (Path(code.co_filename).relative_to(package.parent).as_posix(), *_row(code, self.inside[code], calls))
            for code, calls in self.calls.items()
            if Path(code.co_filename).is_relative_to(package) and not code.co_name.startswith("<")
        )


def _row(code: CodeType, inside: int, calls: int) -> tuple[int, str, int, int]:
    return code.co_firstlineno, code.co_qualname, inside, calls


def hook_loop(trace: StepTrace) -> None:
    """Trace `train_step` of the package's one loop.py. Raises ValueError where there is not exactly one."""
    [file] = (REPOSITORY / PACKAGE).rglob("loop.py")
    loop = importlib.import_module(".".join(file.relative_to(REPOSITORY).with_suffix("").parts))
    loop.train_step = trace.wrap(loop.train_step)  # type: ignore[attr-defined]


def command() -> Callable[[], object]:
    """Find the function behind the package's command, where pyproject.toml says it is."""
    module, _, name = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"][
        PACKAGE
    ].partition(":")
    function: Callable[[], object] = getattr(importlib.import_module(module), name)
    return function


def main() -> None:
    """Run three steps and write what the second called."""
    out = Path(sys.argv[1])
    trace = StepTrace()
    hook_loop(trace)
    # Only threads that start from now on: those of the run.
    threading.setprofile(trace)
    sys.argv = [PACKAGE, "train", str(QUICKSTART / "run.yaml"), *OVERRIDES, "--runs", "runs"]
    try:
        command()()
    except SystemExit as end:
        if end.code:
            raise
    out.write_text(json.dumps(trace.rows(REPOSITORY / PACKAGE)))


if __name__ == "__main__":
    main()
