"""Sets of mathematics, and the readers of rows that they share.

MATH (2103.03874) and its subsets. Schema of DigitalLearningGmbH/MATH-lighteval, the copy of lighteval/MATH that verl's
math_dataset.py reads: `problem`, `level` ("Level 1" to "Level 5", and "Level ?" twice), `type`, `solution`. Rows of it,
as parquet, are in the public code of 2510.14807 and 2506.01347 (data/math): 7,500 and 5,000, of which 564, 1,348,
1,592, 1,690 and 2,304 of the levels 1 to 5 in training. 2510.04028 trains on the 7,500 (section 4.1); 2510.14807 on
levels 3 to 5, and does not say of which split: here it is training. 2601.15609's LightEval is read as the 5,000, which
its name stands for in verl.

MATH12k is hiyouga/math12k, `problem` and `answer`, the training split of 12,000 that leaves MATH-500 out (2511.19942
says 12,000 and 11,998). MATH-500 is HuggingFaceH4/MATH-500; its rows are in public code (simpleRL-reason,
data/math500).

DeepScaleR-Preview-Dataset: competition problems; 2601.15609 trains on "approximately 40.3k problem-answer pairs".
Schema from public code that reads agentica-org/DeepScaleR-Preview-Dataset: `problem`, `answer`, `solution`.

Minerva's undergraduate problems from MIT OpenCourseWare (2206.14858): 272. math-ai/minervamath has `question` and
`answer` by most public code that reads it, `problem` and `solution` by some; the latter, with the answer in the
solution's last box, is the source's own form (rows in simpleRL-reason, data/minerva_math). Both are read.

OlympiadBench (2402.14008), the part that others evaluate on: English, mathematics, text only, open-ended.
Hothan/OlympiadBench, configuration OE_TO_maths_en_COMP, split train, 674 problems: `id`, `question`, `context` or null,
`final_answer` (a list of one text), `unit` or null, `error` or null, and others. Rows are in public code
(simpleRL-reason, data/olympiadbench, 675 of them). One problem has an `error`, by which an answer may be off; it is not
applied.

Mathematics in verl's parquet format, for files of one's own or of a paper's public code: no hub. `prompt` is a list of
messages, the last one the question, and `reward_model.ground_truth` the answer, text or an object with `target`; read
in the public data of 2510.14807 (data/gsm8k_level1, data/math, data/aime2025, data/amc23).

AIME 2024 and 2025, and AMC 2023: 30, 30 and 40 problems. HuggingFaceH4/aime_2024, split train: `id`, `problem`,
`solution`, `answer`, `url`, `year` (rows without the year are in public code: simpleRL-reason, data/aime24).
opencompass/AIME2025, which 2511.19942 cites: two configurations of 15 rows with `question` and `answer`. math-ai/amc23:
`id`, `question`, `answer`, `url`; rows with these fields, the answer a number such as 27.0, are in simpleRL-reason too.
The problems are the Mathematical Association of America's, which grants no licence with them.
"""

from __future__ import annotations

import re

from megasharp.common.errors import UserError
from megasharp.tasks.data_fields import (
    Fields,
    absent,
    number_field,
    object_field,
    optional_text,
    text_field,
    texts_field,
)
from megasharp.tasks.extraction import last_box
from megasharp.tasks.math import MathAnswer
from megasharp.tasks.sets.data_set import DataSet, LeftOut, Part, Problem, Read, Source

NO_BOX = LeftOut("its solution has no boxed answer")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s$.,{}\\]+)")
_LEVEL = re.compile(r"(?:Level )?([1-5?])")


def answered(question: str, answer: str, identity: str = "") -> Read:
    """A reader of rows with these two fields, the answer text or a number, and one that names the row."""

    def read(fields: Fields, where: str) -> Problem:
        name = number_field(fields, identity, where) if identity else ""
        return Problem(text_field(fields, question, where), MathAnswer(number_field(fields, answer, where)), name)

    return read


read_answered = answered("question", "answer")


def boxed_solution(levels: str = "12345?") -> Read:
    r"""A reader of MATH's rows (`problem`, `level`, `solution`): the answer is the solution's last box.

    Rows of other levels are left out; "?" is the level of the few that have none.
    """

    def read(fields: Fields, where: str) -> Problem | LeftOut:
        problem, solution = text_field(fields, "problem", where), text_field(fields, "solution", where)
        if level_of(fields, where) not in levels:
            return LeftOut("another level")
        # Two solutions of MATH have a box without braces, `\boxed 2`.
        answer = last_box(solution) or next(reversed(_BARE_BOX.findall(solution)), "")
        return Problem(problem, MathAnswer(answer)) if answer else NO_BOX

    return read


def level_of(fields: Fields, where: str) -> str:
    """The level of a row of MATH, "1" to "5" or "?", written `Level 3` or 3. Raises UserError for another."""
    match = _LEVEL.fullmatch(str(fields.get("level")))
    if match is None:
        got = f"{fields.get('level')!r}{absent(fields, 'level')}"
        raise UserError(f"{where}: 'level' must be Level 1 to Level 5, got {got}")
    return match[1]


def messages_of(fields: Fields, where: str) -> tuple[tuple[str, str], ...]:
    """The role and the text of each message in `prompt`, a list of {role, content}. Raises UserError for another."""
    messages = fields.get("prompt")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise UserError(f"{where}: 'prompt' must be a list of messages{absent(fields, 'prompt')}")
    inside = f"{where}, prompt"
    return tuple(
        (optional_text(each, "role", inside) or "user", text_field(each, "content", inside)) for each in messages
    )


def verl(fields: Fields, where: str) -> Problem:
    """A row of verl's files: the messages of `prompt`, and `reward_model.ground_truth`, text or {target: text}.

    The last message is the question.
    """
    model = object_field(fields, "reward_model", where)
    inside = f"{where}, reward_model"
    truth = model.get("ground_truth")
    if isinstance(truth, dict):
        answer = number_field(truth, "target", f"{inside}.ground_truth")
    else:
        answer = number_field(model, "ground_truth", inside)
    *before, (_, question) = messages_of(fields, where)
    return Problem(question, MathAnswer(answer), before=tuple(before))


_HUB = "DigitalLearningGmbH/MATH-lighteval"
_REVISION = "0530c78699ea5e8eb5530600900e1f328b48acad"
_LICENCE = "MIT"
TRAIN = Source("math", _HUB, "train", revision=_REVISION)
MATH12K_TRAIN = Part(Source("math12k", "hiyouga/math12k", "train"), answered("problem", "answer"))

MATH_TRAIN = DataSet(
    name="math_train",
    task="math",
    about="MATH, training split",
    parts=(Part(TRAIN, boxed_solution()),),
    prompt="boxed_chatml",
    licence=_LICENCE,
    known="rows",
    used_by="2510.04028",
    expected=7500,
    tolerance=0.001,
)
MATH_LEVELS_3TO5 = DataSet(
    name="math_levels_3to5",
    task="math",
    about="MATH, training split, levels 3 to 5",
    parts=(Part(TRAIN, boxed_solution("345")),),
    prompt="boxed_qwen",
    licence=_LICENCE,
    known="rows",
    used_by="2510.14807",
    expected=5586,
    tolerance=0.001,
)
LIGHTEVAL_MATH = DataSet(
    name="lighteval_math",
    task="math",
    about="MATH, test split",
    parts=(Part(Source("math", _HUB, "test", revision=_REVISION), boxed_solution()),),
    prompt="boxed_chatml",
    licence=_LICENCE,
    known="rows",
    used_by="2601.15609",
    expected=5000,
    tolerance=0.001,
)
MATH12K = DataSet(
    name="math12k",
    task="math",
    about="MATH without MATH-500",
    parts=(MATH12K_TRAIN,),
    prompt="boxed_verl",
    licence="MIT (MATH's; the copy's card was not read)",
    known="code",
    used_by="2511.19942",
    expected=12000,
    tolerance=0.001,
)
MATH500 = DataSet(
    name="math500",
    task="math",
    about="500 test problems of MATH",
    parts=(Part(Source("math500", "HuggingFaceH4/MATH-500", "test"), answered("problem", "answer", "unique_id")),),
    prompt="boxed_chatml",
    licence="MIT (MATH's; the copy's card was not read)",
    known="rows",
    used_by="2510.14807, 2601.15609, 2511.19942, 2510.04028",
    expected=500,
)


DEEPSCALER = DataSet(
    name="deepscaler",
    task="math",
    about="DeepScaleR-Preview",
    parts=(
        Part(
            Source("deepscaler", "agentica-org/DeepScaleR-Preview-Dataset", "train"),
            answered("problem", "answer"),
        ),
    ),
    prompt="boxed_verl",
    licence="MIT (not read)",
    known="code",
    used_by="2601.15609",
    expected=40300,
    tolerance=0.005,
)


def read_minerva(fields: Fields, where: str) -> Problem | LeftOut:
    """A row of either form."""
    if "solution" not in fields:
        return read_answered(fields, where)
    answer = last_box(text_field(fields, "solution", where))
    return Problem(text_field(fields, "problem", where), MathAnswer(answer)) if answer else NO_BOX


MINERVA = DataSet(
    name="minerva",
    task="math",
    about="Minerva's MIT OpenCourseWare problems",
    parts=(Part(Source("minerva", "math-ai/minervamath", "test"), read_minerva),),
    prompt="boxed_chatml",
    licence="none read; the courses are CC BY-NC-SA",
    known="rows",
    used_by="2510.14807, 2601.15609",
    expected=272,
)


def read_olympiadbench(fields: Fields, where: str) -> Problem:
    """The context, where there is one, comes before the question, on a line of its own."""
    context = optional_text(fields, "context", where)
    question = text_field(fields, "question", where)
    answer = ", ".join(texts_field(fields, "final_answer", where))
    text = f"{context}\n{question}" if context else question
    return Problem(text, MathAnswer(answer), number_field(fields, "id", where))


OLYMPIADBENCH = DataSet(
    name="olympiadbench",
    task="math",
    about="OlympiadBench, English text-only mathematics",
    parts=(
        Part(
            Source("olympiadbench", "Hothan/OlympiadBench", "train", config="OE_TO_maths_en_COMP"), read_olympiadbench
        ),
    ),
    prompt="boxed_chatml",
    licence="Apache-2.0 (not read)",
    known="rows",
    used_by="2510.14807, 2601.15609, 2511.19942",
    expected=674,
    tolerance=0.002,
)


VERL_MATH = DataSet(
    name="verl_math",
    task="math",
    about="your own files in verl's format",
    parts=(Part(Source("verl_math", "", "train"), verl),),
    prompt="boxed_qwen",
    licence="",
    known="rows",
)


_COMPETITIONS_LICENCE = "none stated; (c) MAA"

AIME24 = DataSet(
    name="aime24",
    task="math",
    about="AIME 2024, I and II",
    parts=(Part(Source("aime24", "HuggingFaceH4/aime_2024", "train"), answered("problem", "answer", "id")),),
    prompt="boxed_chatml",
    licence=_COMPETITIONS_LICENCE,
    known="rows",
    used_by="2510.14807, 2601.15609, 2511.19942, 2510.04028",
    expected=30,
)
AIME25 = DataSet(
    name="aime25",
    task="math",
    about="AIME 2025, I and II",
    parts=tuple(
        Part(Source(config, "opencompass/AIME2025", "test", config=config), read_answered)
        for config in ("AIME2025-I", "AIME2025-II")
    ),
    prompt="boxed_chatml",
    licence=_COMPETITIONS_LICENCE,
    known="code",
    used_by="2510.14807, 2511.19942, 2510.04028",
    expected=30,
)
AMC23 = DataSet(
    name="amc23",
    task="math",
    about="AMC 2023",
    parts=(Part(Source("amc23", "math-ai/amc23", "test"), answered("question", "answer", "id")),),
    prompt="boxed_chatml",
    licence=_COMPETITIONS_LICENCE,
    known="rows",
    used_by="2510.14807, 2511.19942, 2510.04028",
    expected=40,
)
