"""Names of FP8 recipes, as far as Megatron's classes inherit from them."""

from __future__ import annotations

from enum import Enum


class Format(Enum):
    """What forward and backward products round to."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


class _Recipe:
    def __init__(self, fp8_format: Format = Format.HYBRID, **unused: object) -> None:
        self.fp8_format = fp8_format


class DelayedScaling(_Recipe):
    """Scales from a history of maxima."""


class Float8CurrentScaling(_Recipe):
    """Scales from each tensor itself."""


class Float8BlockScaling(_Recipe):
    """Scales for blocks of 128."""


class MXFP8BlockScaling(_Recipe):
    """Scales for blocks of 32."""
