"""AIME 2024 and 2025, and AMC 2023: 30, 30 and 40 problems.

HuggingFaceH4/aime_2024, split train: `id`, `problem`, `solution`, `answer`, `url`, `year` (rows without the year are in
public code: simpleRL-reason, data/aime24). opencompass/AIME2025, which 2511.19942 cites: two configurations of 15 rows
with `question` and `answer`. math-ai/amc23: `id`, `question`, `answer`, `url`; rows with these fields, the answer a
number such as 27.0, are in simpleRL-reason too. The problems are the Mathematical Association of America's, which
grants no licence with them.
"""

from __future__ import annotations

from megasharp.data.sets.base import DataSet, Part, Source
from megasharp.data.sets.mathematics import answered

_LICENCE = "none stated; (c) MAA"
_AIME25_READ = answered("question", "answer")

AIME24 = DataSet(
    name="aime24",
    task="math",
    about="AIME 2024, I and II",
    parts=(Part(Source("aime24", "HuggingFaceH4/aime_2024", "train"), answered("problem", "answer", "id")),),
    prompt="boxed_chatml",
    licence=_LICENCE,
    known="rows",
    used_by="2510.14807, 2601.15609, 2511.19942, 2510.04028",
    expected=30,
)
AIME25 = DataSet(
    name="aime25",
    task="math",
    about="AIME 2025, I and II",
    parts=tuple(
        Part(Source(config, "opencompass/AIME2025", "test", config=config), _AIME25_READ)
        for config in ("AIME2025-I", "AIME2025-II")
    ),
    prompt="boxed_chatml",
    licence=_LICENCE,
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
    licence=_LICENCE,
    known="rows",
    used_by="2510.14807, 2511.19942, 2510.04028",
    expected=40,
)
