"""`megasharp probe`: log-probs of the same responses under a run's base model and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.cli.options import RunNames, RunsFolder
from megasharp.common import output
from megasharp.common.exit_codes import collect_as_usual, status


def probe(
    names: RunNames,
    suite: Annotated[
        str | None, typer.Option(help="Suite whose problems are read. Without it: the run's first.")
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Number of responses to sample, if the run has none.")] = 32,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Score the same responses with a run's base model and each checkpoint, for `megasharp report`."""
    output.outlive()
    status(f"loading PyTorch, then reading {', '.join(names)}")
    from megasharp.trainer.eval_source import probe_runs

    collect_as_usual()
    probe_runs(names, runs, suite, problems, typer.echo)
