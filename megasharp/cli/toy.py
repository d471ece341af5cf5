"""`megasharp toy`: pick a study, run it, show and write what it finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megasharp.common.errors import UserError, nearest
from megasharp.common.exit_codes import collect_as_usual, status

if TYPE_CHECKING:
    from megasharp.studies.study import Options


def toy(
    name: Annotated[str, typer.Argument(help="Name of a study. Without one, all are listed.")] = "",
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds. Without it: the study's own default.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder, for studies that measure a model.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for NAME/, with the CSV files and the picture.")] = Path("toys"),
    scoreboard: Annotated[
        bool,
        typer.Option(
            help="Run all studies and write claims.md: each claim of the papers, its test and the verdict.",
            show_default=False,
        ),
    ] = False,
) -> None:
    """Run one of the papers' small studies: tables, CSV files and a picture."""
    status("loading PyTorch, then the studies")
    from megasharp.studies import STUDIES
    from megasharp.studies.study import Options

    collect_as_usual()
    if scoreboard:
        if name:
            raise UserError(f"--scoreboard runs all studies that it needs; leave {name} out")
        typer.echo(f"wrote {write_scoreboard(Options(seeds, seed), out)}")
        return
    if not name:
        width = max((len(study) for study in STUDIES), default=0)
        typer.echo("\n".join(f"{s.name:{width}}  {s.title} (arXiv {s.paper})" for s in STUDIES.values()))
        return
    for path in run_study(name, Options(seeds, seed, model), out):
        typer.echo(f"wrote {path}")


def run_study(name: str, options: Options, out: Path) -> list[Path]:
    """Run the study called `name` and write its files into `out`/`name`.

    Raises UserError for an unknown name, for a model given to a study that measures none, or for one that is missing.
    """
    from megasharp.studies import STUDIES
    from megasharp.studies.study import open_console, print_findings, write_findings

    if name not in STUDIES:
        raise UserError(f"toy: no study is called {name!r}; {nearest(name, STUDIES)}")
    study, model = STUDIES[name], options.model
    if model is not None and not study.takes_model:
        takers = ", ".join(other.name for other in STUDIES.values() if other.takes_model)
        raise UserError(f"--model {model}: toy {name} measures no model; leave --model out (it is for {takers})")
    if model is not None:
        from megasharp.config.hub import given_model

        model = given_model(str(model))
        options = replace(options, model=model)
    if model is not None and not model.is_dir():
        raise UserError(f"--model {model}: no such folder; give a Hugging Face checkpoint folder")
    findings = study.run(options)
    print_findings(study, findings, open_console())
    return write_findings(study, findings, out / name)


def write_scoreboard(options: Options, out: Path) -> Path:
    """Run the studies that claims name and write `out`/claims.md. Raises UserError where a run contradicts one."""
    from megasharp.common.files import write_text
    from megasharp.studies import STUDIES
    from megasharp.studies.scoreboard.page import needed_studies, scoreboard
    from megasharp.studies.scoreboard.verdicts import DISTANCES

    claims = {}
    for name in needed_studies():
        status(f"running {name}")
        claims[name] = STUDIES[name].run(options).claims
    # Figures of the examples are read where this is run in the repository.
    path, root = out / "claims.md", Path()
    write_text(path, scoreboard(claims, root if (root / DISTANCES).parent.is_dir() else None))
    return path
