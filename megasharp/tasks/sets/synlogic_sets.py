"""SynLogic-easy (2505.19641): 27 logic tasks, about 16,000 problems for training, and a validation split.

The card of MiniMaxAI/SynLogic names the configurations easy and hard and the splits train and validation. Fields from
public code that reads it: `prompt` (a list of messages), `data_source` (the task), and `extra_info.game_data_str`, the
problem's data as JSON text; `reward_model` is empty. 2510.14807 trains on easy's training split and evaluates on its
validation split. The message asks for the answer's form itself; that a chat template writes it is ours.
"""

from __future__ import annotations

from megasharp.tasks.data_fields import Fields, object_field, text_field
from megasharp.tasks.sets.data_set import DataSet, Part, Problem, Source
from megasharp.tasks.sets.math_sets import messages_of
from megasharp.tasks.synlogic import answer_of


def read(fields: Fields, where: str) -> Problem:
    """A row. A source such as `val/sudoku` is of the task behind its last stroke."""
    task = text_field(fields, "data_source", where).rpartition("/")[2]
    game = text_field(object_field(fields, "extra_info", where), "game_data_str", f"{where}, extra_info")
    *before, (_, question) = messages_of(fields, where)
    return Problem(question, answer_of(task, game, where), before=tuple(before))


def _set(name: str, about: str, split: str, expected: int | None, tolerance: float) -> DataSet:
    return DataSet(
        name=name,
        task="synlogic",
        about=about,
        parts=(Part(Source("synlogic", "MiniMaxAI/SynLogic", split, config="easy"), read),),
        prompt="chat",
        licence="none on the card; the repository is MIT",
        known="code",
        used_by="2510.14807",
        expected=expected,
        tolerance=tolerance,
    )


SYNLOGIC_EASY = _set("synlogic_easy", "SynLogic-easy, training split", "train", 16_000, 0.05)
SYNLOGIC_EASY_VALIDATION = _set("synlogic_easy_validation", "SynLogic-easy, validation split", "validation", None, 0.0)
