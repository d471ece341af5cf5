"""pyarrow without pandas, which a run that writes tables of plain values need not wait for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pyarrow as pa


class _NoPandas(MetaPathFinder):
    """Finds nothing, and ends the search for pandas."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ImportError("pandas is imported by who converts to it")
        return None


def leave_pandas_out() -> None:
    """Have pyarrow look for pandas now and not find it; half a second of CPU, with the first table that it makes.

    pyarrow wants to know whether a list may be a pandas Series. It looks again when a table is converted to pandas or
    from it, so that `to_pandas` and `from_pandas` work afterwards; until then `pa.array` of a Series keeps its NaN
    instead of making it null. Nothing changes where pandas is imported already.
    """
    if "pandas" in sys.modules:
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(finder)
