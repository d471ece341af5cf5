"""The page of claims is what its studies say: all of them run, and no verdict on the page is another one's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_ROW = re.compile(r'\| <a id="([^"]+)"></a>.* \| \*\*(.+?)\*\* \|')


def verdicts(page: Path) -> dict[str, str]:
    """Verdicts by the claims' ids."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found = {match[1]: match[2] for line in lines if (match := _ROW.match(line))}
    assert len(found) > 200
    return found


@pytest.mark.long("examples")
def test_the_page_of_claims_is_what_the_studies_say(tmp_path: Path) -> None:
    """A study whose figures contradict a verdict fails the command itself."""
    command = [sys.executable, "-m", "megasharp.cli", "toy", "--scoreboard", "--out", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    assert verdicts(tmp_path / "claims.md") == verdicts(REPOSITORY / "docs" / "claims.md")
