r"""Problems of mathematics with a known answer: JSONL with the fields of MATH-500.

Schema of HuggingFaceH4/MATH-500, `test.jsonl`: `problem`, `solution`, `answer`, `subject`, `level`, `unique_id`. Read
are `problem`, `answer` and, for the id, `unique_id` or `id`; a file of one's own needs no more than the first two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megasharp.data.lines import check_names, name_of, read_objects, text_field
from megasharp.rewards.math import MathAnswer


@dataclass(frozen=True, slots=True)
class MathRecord:
    r"""One line of a data file.

    Example: `{"id": "half", "problem": "What is $1 - \\frac12$?", "answer": "\\frac{1}{2}"}`.
    """

    id: str
    problem: str
    answer: MathAnswer


def read_records(path: Path) -> list[MathRecord]:
    """Read a JSONL file of problems. Raises UserError, naming the file and the line, for what it must not hold."""
    records = [
        MathRecord(
            name_of(fields, ("unique_id", "id"), path, where),
            text_field(fields, "problem", where),
            MathAnswer(text_field(fields, "answer", where)),
        )
        for where, fields in read_objects(path, "write lines with 'problem' and 'answer'")
    ]
    check_names([record.id for record in records], path)
    return records
