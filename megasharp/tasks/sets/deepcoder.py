"""DeepCoder-Preview: programming problems with tests; 2510.14807 trains on its training set.

agentica-org/DeepCoder-Preview-Dataset, configurations primeintellect, taco and lcbv5, split train, 24,287 problems in
all: `problem`, `tests` (JSON text, `program_tests.py`) and, in lcbv5, `starter_code` and `metadata`. The shapes of
tests are those that rllm's prepare_deepcoder_data.py and code_reward.py read; no row was seen.
"""

from __future__ import annotations

from megasharp.tasks.data_fields import Fields, optional_text, text_field
from megasharp.tasks.sets.data_set import DataSet, LeftOut, Part, Problem, Source
from megasharp.tasks.sets.program_tests import answer_of, function_in, json_field, question_with_format

_HUB = "agentica-org/DeepCoder-Preview-Dataset"


def read(fields: Fields, where: str) -> Problem | LeftOut:
    """A row of any configuration."""
    metadata = json_field(fields, "metadata", where) if fields.get("metadata") else {}
    answer = answer_of(json_field(fields, "tests", where), function_in(metadata), where)
    if isinstance(answer, LeftOut):
        return answer
    starter = optional_text(fields, "starter_code", where)
    return Problem(question_with_format(text_field(fields, "problem", where), starter), answer)


DEEPCODER = DataSet(
    name="deepcoder",
    task="code",
    about="DeepCoder-Preview, training",
    parts=tuple(
        Part(Source(config, _HUB, "train", config=config), read) for config in ("primeintellect", "taco", "lcbv5")
    ),
    prompt="deepcoder",
    licence="MIT (not read)",
    known="code",
    used_by="2510.14807",
    expected=24287,
    tolerance=0.01,
)
