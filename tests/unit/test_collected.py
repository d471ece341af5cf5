"""No test file lies where pytest does not look: by its defaults it passes over folders called build and dist."""

from __future__ import annotations

import pytest

REPOSITORY_TESTS = "tests"


def test_every_folder_of_tests_is_gone_into(pytestconfig: pytest.Config) -> None:
    root = pytestconfig.rootpath
    passed_over = [pattern.strip("/") for pattern in pytestconfig.getini("norecursedirs")]
    folders = {path.relative_to(root).parent for path in (root / REPOSITORY_TESTS).rglob("test_*.py")}
    hidden = [f for f in folders if any(part.match(p) for p in passed_over for part in (f, *f.parents) if part.name)]
    assert len(folders) > 30 and hidden == []
