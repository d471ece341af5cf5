"""FP8 contexts that round nothing; `ENTERED` counts the formats they were asked for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

ENTERED: Counter[str] = Counter()


class FP8GlobalStateManager:
    """Whether FP8 is on: never."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """No."""
        return False


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, **unused: object) -> Iterator[None]:
    """Counts the recipe."""
    if enabled:
        ENTERED[f"{type(fp8_recipe).__name__} {fp8_recipe.fp8_format.value}"] += 1
    yield


@contextlib.contextmanager
def fp8_model_init(enabled: bool = True, **unused: object) -> Iterator[None]:
    """Weights stay in params_dtype."""
    yield
