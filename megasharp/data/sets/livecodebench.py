"""LiveCodeBench (2403.07974), code generation, release 5 from August 2024 on: 279 problems.

That is what DeepCoder, 2510.14807's training set, leaves out and evaluates on; 2510.14807 itself does not name a
release. Schema from LiveCodeBench's own code_generation.py, for livecodebench/code_generation_lite: `question_content`,
`question_id`, `contest_date`, `starter_code`, and as JSON text `public_test_cases`, `private_test_cases` (or encoded,
`encoded.py`) and `metadata`. Its loader is a script, which `datasets` runs no longer, so its files are read: test4 and
test5 are what releases 4 and 5 added, after July 2024. They unpack to more than a gigabyte.
"""

from __future__ import annotations

import json
from datetime import date

from megasharp.data.lines import Fields, absent, optional_text, text_field
from megasharp.data.sets.base import DataSet, LeftOut, Part, Problem, Source
from megasharp.data.sets.encoded import decoded
from megasharp.data.sets.programs import answer_of, function_in, json_field, question_with_format
from megasharp.errors import UserError

_FROM, _UNTIL = date(2024, 8, 1), date(2025, 2, 1)


def read(fields: Fields, where: str) -> Problem | LeftOut:
    """A row; problems of contests before August 2024 or after January 2025 are left out."""
    if not _FROM <= _day(fields, where) <= _UNTIL:
        return LeftOut(f"a contest before {_FROM} or after {_UNTIL}")
    public = json_field(fields, "public_test_cases", where)
    private = _private(fields, where)
    if not isinstance(public, list) or not isinstance(private, list):
        raise UserError(f"{where}: 'public_test_cases' and 'private_test_cases' must hold lists")
    function = function_in(json_field(fields, "metadata", where))
    answer = answer_of([*public, *private], function, where)
    if isinstance(answer, LeftOut):
        return answer
    question = f"### Question:\n{text_field(fields, 'question_content', where)}"
    starter = optional_text(fields, "starter_code", where)
    return Problem(question_with_format(question, starter), answer, text_field(fields, "question_id", where))


def _day(fields: Fields, where: str) -> date:
    """`contest_date` is ISO text, or a date where a table has types."""
    value = fields.get("contest_date")
    try:
        return date.fromisoformat(str(value)[:10])
    except ValueError as error:
        told = f"{where}: 'contest_date' must be a date as 2024-08-01, got {value!r}{absent(fields, 'contest_date')}"
        raise UserError(told) from error


def _private(fields: Fields, where: str) -> object:
    text = text_field(fields, "private_test_cases", where)
    if not text.lstrip().startswith("["):
        text = decoded(text, f"{where}, private_test_cases")
    try:
        tests: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: 'private_test_cases' holds no JSON ({error})") from error
    return tests


LIVECODEBENCH = DataSet(
    name="livecodebench",
    task="code",
    about="LiveCodeBench, 2024-08 to 2025-01",
    parts=(
        Part(
            Source("livecodebench", "livecodebench/code_generation_lite", "test", files=("test4.jsonl", "test5.jsonl")),
            read,
        ),
    ),
    prompt="livecodebench",
    licence="not read; the contests' own terms",
    known="code",
    used_by="2510.14807",
    expected=279,
    tolerance=0.02,
)
