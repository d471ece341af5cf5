"""Environment variables of this process for the length of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def variables(inside: Mapping[str, str]) -> Iterator[None]:
    """Set these while the block runs; children that start in it have them too."""
    before = {name: os.environ.get(name) for name in inside}
    os.environ.update(inside)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
