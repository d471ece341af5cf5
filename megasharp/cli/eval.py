"""`megasharp eval`: evaluate a model on suites, or compare two results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.common import output
from megasharp.common.exit_codes import collect_as_usual, note


def evaluate(
    source: Annotated[
        Path | None, typer.Argument(help="A run, one of its checkpoints, or a Hugging Face folder.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="Suites or groups of them, by name or file; without it the run's eval.suites.")
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:FUNCTION", help="A function judges, as reward.function; several are added up."),
    ] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Samples per problem; 64, or the group's.")] = None,
    k: Annotated[str | None, typer.Option(help="For pass@k: 1,4,16 or 1,2,4,...,1024.")] = None,
    temperature: Annotated[str | None, typer.Option(help="One or several, as 0.6,1.0; 1.0, or the group's.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; 1.0, or the group's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest response; the group's, or the run's.")] = None,
    prompt: Annotated[str | None, typer.Option(help="A prompt template, or suite: each one's as published.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; {checkpoint} in it: its name.")] = None,
    engines: Annotated[Path | None, typer.Option(help="A run file: its SGLang engines sample.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="With --engines: key=value for it.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that judge responses; 0: this one, if the task may.", min=0)
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="With --workers: seconds for one response.", min=0.01)] = 10.0,
    sandbox: Annotated[bool, typer.Option(help="Programs run in bubblewrap; else with your rights.")] = True,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A.json B.json", help="Compare two results instead.")
    ] = None,
    problems: Annotated[bool, typer.Option("--problems", help="With --compare: name the problems.")] = False,
) -> None:
    """Evaluate a model: pass@k, maj@k, entropies, with intervals; goes on where it was cut off. Or compare two results.

    Exit code 75: SIGUSR1 came, what was sampled is kept.
    """
    if compare is not None:
        from megasharp.trainer.evaluation import compare_results

        compare_results(source, *compare, k, problems, typer.echo)
        return
    from megasharp.config.data import RewardConfig, RewardFunction
    from megasharp.trainer.evaluation import Asked, evaluate_source, numbers, settings

    output.outlive()
    collect_as_usual()
    asked = Asked(
        source,
        [name.strip() for name in (suite or "").split(",") if name.strip()],
        settings(n, k, top_p, max_tokens),
        numbers(temperature),
        seed,
        out,
        engines,
        overrides or [],
        RewardConfig(
            workers=workers,
            timeout_s=timeout_s,
            sandbox="bubblewrap" if sandbox else "none",
            functions=[RewardFunction(function=path) for path in reward or ()],
        ),
        prompt,
    )
    evaluate_source(asked, typer.echo, note)
