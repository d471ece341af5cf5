"""transformers' classes that read a folder, without its second look at all of its models: a quarter of a second.

When transformers is imported it reads which names each of its 1,600 files on models defines. Its package of models does
so once more with the first class that stands there, because the folder is named otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import import_utils

_MODELS = Path(transformers.__file__).parent / "models"


def _scanned_once(scan: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the scan, which keeps its results, so that the package's file stands for its folder."""
    return lambda path: scan(_MODELS if str(path) == str(_MODELS / "__init__.py") else path)


# Versions that have no such function are imported as they are.
_scan = getattr(import_utils, "create_import_structure_from_path", None)
if _scan is not None:
    import_utils.create_import_structure_from_path = _scanned_once(_scan)
try:
    from transformers import AutoConfig, AutoTokenizer
finally:
    if _scan is not None:
        import_utils.create_import_structure_from_path = _scan

__all__ = ["AutoConfig", "AutoTokenizer"]
