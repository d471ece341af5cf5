"""Notebooks are committed as they ran: executed from first to last, with outputs, and without traces of a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cases import each_case

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "docs").glob("**/*.ipynb"))
# A folder of the machine that ran it.
MACHINE = re.compile(r"(?<![\w.])/(?:home|mnt|opt|private|root|scratch|tmp|usr|var|work|Users)/")
LARGEST = 600_000


@each_case("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_a_notebook_is_stored_as_it_ran(notebook: Path) -> None:
    text = notebook.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"] == []
    shown = [part for output in outputs for part in (output.get("text", ""), *output.get("data", {}).values())]
    assert [found[0] for found in map(MACHINE.search, map(str, shown)) if found] == []
    assert len(text) < LARGEST
