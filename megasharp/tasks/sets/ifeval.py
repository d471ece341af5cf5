"""IFEval (2311.07911): 541 prompts with instructions that a program can verify.

Schema from the card of google/IFEval: `key`, `prompt`, `instruction_id_list`, and `kwargs`, in which arguments that an
instruction does not have are null. It has one split, named train, and is for evaluation. Sets made like it for training
are read by task `instructions`.
"""

from __future__ import annotations

from megasharp.tasks.data_fields import Fields, number_field, text_field
from megasharp.tasks.instructions import read_answer
from megasharp.tasks.sets.data_set import DataSet, Part, Problem, Source


def read(fields: Fields, where: str) -> Problem:
    """A row, named by its key."""
    return Problem(text_field(fields, "prompt", where), read_answer(fields, where), number_field(fields, "key", where))


IFEVAL = DataSet(
    name="ifeval",
    task="instructions",
    about="IFEval, prompts with verifiable instructions",
    parts=(Part(Source("ifeval", "google/IFEval", "train"), read),),
    prompt="plain",
    licence="Apache-2.0",
    known="card",
    expected=541,
)
