"""Code that a page shows, run as it stands there: blocks fenced with `title="PATH"`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
_BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def titled_blocks(page: str) -> dict[str, str]:
    """Return the blocks of a how-to page by their titles, which are paths in the repository."""
    return dict(_BLOCK.findall((HOW_TO / page).read_text(encoding="utf-8")))


def import_block(monkeypatch: pytest.MonkeyPatch, blocks: dict[str, str], path: str) -> ModuleType:
    """Run the block of a path as its module, which other code can import until the test ends."""
    name = path.removesuffix(".py").replace("/", ".")
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(blocks[path], path, "exec"), vars(module))
    return module
