"""BIG-Bench Hard: a question and the short text that answers it, with the boxed prompt.

Schema of lukaemon/bbh: `input`, `target`, one configuration a task. The authors' own repository
(suzgunmirac/BIG-Bench-Hard, `bbh/<task>.json`) has the same objects in the list `examples` of one; write one a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megasharp.data.lines import check_names, name_of, read_objects, text_field
from megasharp.rewards.short_answer import ShortAnswer


@dataclass(frozen=True, slots=True)
class ShortAnswerRecord:
    """One line of a data file. Example: `{"input": "not ( True ) and ( True ) is", "target": "False"}`."""

    id: str
    question: str
    answer: ShortAnswer


def read_records(path: Path) -> list[ShortAnswerRecord]:
    """Read a JSONL file of problems. Raises UserError, naming the file and the line, for what it must not hold."""
    records = [
        ShortAnswerRecord(
            name_of(fields, ("id",), path, where),
            text_field(fields, "input", where),
            ShortAnswer(text_field(fields, "target", where)),
        )
        for where, fields in read_objects(path, "write lines with 'input' and 'target'")
    ]
    check_names([record.id for record in records], path)
    return records
