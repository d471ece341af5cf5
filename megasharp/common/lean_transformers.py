"""`AutoConfig` and `AutoTokenizer` of transformers, imported a quarter of a second faster.

Importing transformers scans the names that each of its 1,600 model files defines, and keeps the result by path. Its
package of models scans the same folder again because it passes the path of its `__init__.py`; here both are one path.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers.utils import import_utils

_MODELS = Path(transformers.__file__).parent / "models"


# Versions that have no such function are imported as they are.
_scan = getattr(import_utils, "create_import_structure_from_path", None)
if _scan is not None:
    import_utils.create_import_structure_from_path = lambda path: _scan(
        _MODELS if str(path) == str(_MODELS / "__init__.py") else path
    )
try:
    from transformers import AutoConfig, AutoTokenizer
finally:
    if _scan is not None:
        import_utils.create_import_structure_from_path = _scan

__all__ = ["AutoConfig", "AutoTokenizer"]
