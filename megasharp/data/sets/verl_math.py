"""Mathematics in verl's parquet format, for files of one's own or of a paper's public code: no hub.

`prompt` is a list of messages, the last one the question, and `reward_model.ground_truth` the answer, text or an object
with `target`; read in the public data of 2510.14807 (data/gsm8k_level1, data/math, data/aime2025, data/amc23).
"""

from __future__ import annotations

from megasharp.data.sets.base import DataSet, Part, Source
from megasharp.data.sets.mathematics import verl

VERL_MATH = DataSet(
    name="verl_math",
    task="math",
    about="your own files in verl's format",
    parts=(Part(Source("verl_math", "", "train"), verl),),
    prompt="boxed_qwen",
    licence="",
    known="rows",
)
