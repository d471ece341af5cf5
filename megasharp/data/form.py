"""Prompts of which only the form of the response is judged: one's own text, and the form that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from megasharp.data.lines import check_names, name_of, read_objects, text_field
from megasharp.errors import UserError
from megasharp.rewards.form import Form, FormAnswer


@dataclass(frozen=True, slots=True)
class FormRecord:
    """One line of a data file. Example: `{"prompt": "Answer in a box: what is 1+1?", "form": "box"}`."""

    id: str
    prompt: str
    answer: FormAnswer


def read_records(path: Path) -> list[FormRecord]:
    """Read a JSONL file of prompts. Raises UserError, naming the file and the line, for what it must not hold."""
    records: list[FormRecord] = []
    for where, fields in read_objects(path, "write lines with 'prompt' and 'form'"):
        named = text_field(fields, "form", where)
        form: Form | None = next((each for each in get_args(Form) if each == named), None)
        if form is None:
            raise UserError(f"{where}: 'form' must be one of {', '.join(get_args(Form))}, got {named!r}")
        name = name_of(fields, ("id",), path, where)
        records.append(FormRecord(name, text_field(fields, "prompt", where), FormAnswer(form)))
    check_names([record.id for record in records], path)
    return records
