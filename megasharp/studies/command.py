"""`megasharp toy`: pick a study, run it, show and write what it finds."""

from __future__ import annotations

from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.studies import STUDIES
from megasharp.studies.study import Options, Study, open_console, print_findings, write_findings


def list_studies() -> str:
    """One line per study."""
    width = max((len(name) for name in STUDIES), default=0)
    return "\n".join(f"{s.name:{width}}  {s.title} (arXiv {s.paper})" for s in STUDIES.values())


def run_study(name: str, options: Options, out: Path) -> list[Path]:
    """Run the study called `name` and write its files into `out`/`name`.

    Raises UserError for an unknown name, for a model given to a study that measures none, or for one that is missing.
    """
    if name not in STUDIES:
        raise UserError(f"toy: no study is called {name!r}; there are: {', '.join(STUDIES)}")
    study = STUDIES[name]
    if options.model is not None:
        _check_model(study, options.model)
    findings = study.run(options)
    print_findings(study, findings, open_console())
    return write_findings(study, findings, out / name)


def _check_model(study: Study, folder: Path) -> None:
    if not study.takes_model:
        takers = ", ".join(other.name for other in STUDIES.values() if other.takes_model)
        raise UserError(f"--model {folder}: toy {study.name} measures no model; leave --model out (it is for {takers})")
    if not folder.is_dir():
        raise UserError(f"--model {folder}: no such folder; give a Hugging Face checkpoint folder")
