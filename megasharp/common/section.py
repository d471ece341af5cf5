"""The base class of every table of a configuration file, and of records that are read back from disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

# A number that a file may leave open: null there, and a number in every resolved run, which is all that is read.
if TYPE_CHECKING:
    DerivedInt = int
else:
    DerivedInt = int | None
LEFT_OPEN: Any = None


class Section(BaseModel):
    """One table of a configuration file. Unknown keys and non-finite numbers fail; values are not coerced; frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)
