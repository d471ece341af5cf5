"""ARC-Challenge (1803.05457) and MMLU-Pro (2406.01574), test splits; `tasks/choice.py` cites and reads their schemas.

2510.04028 evaluates on 128 random questions of each, three times (appendix C.2), of 1,170 and 12,000 by its count; the
cards say 1,172 and 12,032.
"""

from __future__ import annotations

from pathlib import Path

from megasharp.tasks.choice import read_arc, read_mmlu_pro
from megasharp.tasks.data_fields import Fields, number_field
from megasharp.tasks.sets.data_set import DataSet, Part, Problem, Source


def arc(fields: Fields, where: str) -> Problem:
    """A row of ARC."""
    record = read_arc(fields, Path("arc_c"), where)
    return Problem(record.text, record.answer, number_field(fields, "id", where))


def mmlu_pro(fields: Fields, where: str) -> Problem:
    """A row of MMLU-Pro."""
    record = read_mmlu_pro(fields, Path("mmlu_pro"), where)
    return Problem(record.text, record.answer, number_field(fields, "question_id", where))


ARC_C = DataSet(
    name="arc_c",
    task="choice",
    about="ARC-Challenge, test split",
    parts=(Part(Source("arc_c", "allenai/ai2_arc", "test", config="ARC-Challenge"), arc),),
    prompt="boxed_chatml",
    licence="CC BY-SA 4.0",
    known="card",
    used_by="2510.04028",
    expected=1172,
)
MMLU_PRO = DataSet(
    name="mmlu_pro",
    task="choice",
    about="MMLU-Pro, test split",
    parts=(Part(Source("mmlu_pro", "TIGER-Lab/MMLU-Pro", "test"), mmlu_pro),),
    prompt="boxed_chatml",
    licence="MIT",
    known="card",
    used_by="2510.04028",
    expected=12032,
    tolerance=0.001,
)
