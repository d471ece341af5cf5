"""`megasharp probe`: log-probs of the same responses under a run's base model and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.cli.options import RunNames, RunsFolder
from megasharp.common import output
from megasharp.common.exit_codes import collect_as_usual


def probe(
    names: RunNames,
    suite: Annotated[str | None, typer.Option(help="Whose problems are read; the run's first suite.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Where the run has no responses yet: how many to sample.")] = 32,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Let a run's base model and checkpoints read the same responses, for `megasharp report`; what is there stays."""
    from megasharp.trainer.eval_source import probe_runs

    output.outlive()
    collect_as_usual()
    probe_runs(names, runs, suite, problems, typer.echo)
