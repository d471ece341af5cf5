"""`megasharp toy`: pick a study, run it, show and write what it finds."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from megasharp.errors import UserError
from megasharp.labs import STUDIES
from megasharp.labs.output import print_findings, write_findings
from megasharp.labs.study import Options


def list_studies() -> str:
    """One line per study."""
    width = max((len(name) for name in STUDIES), default=0)
    return "\n".join(f"{s.name:{width}}  {s.title} (arXiv {s.paper})" for s in STUDIES.values())


def run_study(name: str, options: Options, out: Path) -> list[Path]:
    """Run the study called `name` and write its files into `out`/`name`. Raises UserError for an unknown name."""
    if name not in STUDIES:
        raise UserError(f"toy: no study is called {name!r}; there are: {', '.join(STUDIES)}")
    study = STUDIES[name]
    findings = study.run(options)
    print_findings(study, findings, Console())
    return write_findings(study, findings, out / name)
