"""SGLang's arguments, the one seam that is read without the rest of SGLang; `sglang_internals.py` names the others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any, get_args, get_origin

import msgspec
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs

__all__ = ["ServerArgs", "fields", "judge"]


def fields() -> Collection[Any]:
    """The fields of ServerArgs, each with `name`, `type` and `default`."""
    found: Collection[Any] = record_fields(ServerArgs)
    return found


def judge(annotation: Any) -> Callable[[object], str | None]:
    """Return a function that names the fault of a value for a field of this type; None where there is none."""
    plain, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    choices = next((note.choices for note in notes if getattr(note, "choices", None)), None)

    def fault(value: object) -> str | None:
        try:
            msgspec.convert(value, plain)
        except msgspec.ValidationError as error:
            return str(error)
        if choices is not None and value is not None and value not in choices:
            return f"it must be one of {', '.join(map(str, choices))}"
        return None

    return fault
