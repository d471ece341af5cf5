"""HumanEval+ (2305.01210): 164 functions to complete, with many more tests than HumanEval.

Schema from public code that reads evalplus/humanevalplus: `task_id`, `prompt` (a signature with its docstring),
`canonical_solution`, `entry_point`, and `test`, which defines `check(candidate)`.
"""

from __future__ import annotations

from megasharp.data.lines import Fields, text_field
from megasharp.data.sets.base import DataSet, Part, Problem, Source
from megasharp.errors import UserError
from megasharp.rewards.code import CodeAnswer


def read(fields: Fields, where: str) -> Problem:
    """A row. What the prompt defines, helpers of a few problems among it, is there for the check."""
    prompt, check = text_field(fields, "prompt", where), text_field(fields, "test", where)
    if "def check(" not in check:
        raise UserError(f"{where}: 'test' must define check(candidate)")
    answer = CodeAnswer(function=text_field(fields, "entry_point", where), check=check, setup=prompt)
    return Problem(prompt.strip(), answer, text_field(fields, "task_id", where))


HUMANEVAL_PLUS = DataSet(
    name="humaneval_plus",
    task="code",
    about="HumanEval+",
    parts=(Part(Source("humaneval_plus", "evalplus/humanevalplus", "test"), read),),
    prompt="evalplus",
    licence="Apache-2.0",
    known="code",
    used_by="2510.14807",
    expected=164,
)
