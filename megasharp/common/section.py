"""The base class of every table of a configuration file, and of records that are read back from disk."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of a configuration file. Unknown keys and non-finite numbers fail; values are not coerced; frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)
