"""DeepScaleR-Preview-Dataset: competition problems; 2601.15609 trains on "approximately 40.3k problem-answer pairs".

Schema from public code that reads agentica-org/DeepScaleR-Preview-Dataset: `problem`, `answer`, `solution`.
"""

from __future__ import annotations

from megasharp.data.sets.base import DataSet, Part, Source
from megasharp.data.sets.mathematics import answered

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
