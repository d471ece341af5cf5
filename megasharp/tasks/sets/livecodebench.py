"""Programming problems for evaluation: LiveCodeBench (2403.07974) and HumanEval+ (2305.01210).

LiveCodeBench is its code generation, release 5 from August 2024 on: 279 problems. That is what DeepCoder, 2510.14807's
training set, leaves out and evaluates on; 2510.14807 itself does not name a release. Schema from LiveCodeBench's own
code_generation.py, for livecodebench/code_generation_lite: `question_content`, `question_id`, `contest_date`,
`starter_code`, and as JSON text `public_test_cases`, `private_test_cases` (or encoded) and `metadata`. Its loader is a
script, which `datasets` runs no longer, so its files are read: test4 and test5 are what releases 4 and 5 added, after
July 2024. They unpack to more than a gigabyte.

Its private tests are base64 of zlib of a pickle of one text, which is JSON. Its own code unpickles
(lcb_runner/benchmarks/code_generation.py), and a pickle may run anything. Nothing is unpickled here: the pickle's
instructions are read, and where they are others than those that make one text, it is refused.

HumanEval+ is 164 functions to complete, with many more tests than HumanEval. Schema from public code that reads
evalplus/humanevalplus: `task_id`, `prompt` (a signature with its docstring), `canonical_solution`, `entry_point`, and
`test`, which defines `check(candidate)`.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from datetime import date

from megasharp.common.errors import UserError
from megasharp.tasks.code import CodeAnswer
from megasharp.tasks.data_fields import Fields, absent, optional_text, text_field
from megasharp.tasks.sets.data_set import DataSet, LeftOut, Part, Problem, Source
from megasharp.tasks.sets.program_tests import answer_of, function_in, json_field, question_with_format

# A problem's tests, unpacked. The largest are tens of megabytes; a bomb would be any size.
MAX_BYTES = 1 << 30
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


def decoded(text: str, where: str, limit: int = MAX_BYTES) -> str:
    """The JSON text in an encoded field.

    Raises UserError, naming `where`: not base64 or zlib, more than `limit` bytes, or a pickle of more than one text.
    """
    try:
        unpacker = zlib.decompressobj()
        packed = base64.b64decode(text, validate=True)
        pickled = unpacker.decompress(packed, limit)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise UserError(f"{where}: neither JSON nor base64 of zlib ({error})") from error
    if not unpacker.eof:
        raise UserError(f"{where}: more than {limit} bytes, or cut off")
    return _only_text(pickled, where)


def _only_text(pickled: bytes, where: str) -> str:
    texts: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(pickled):
            if operation.name in _TEXTS:
                texts.append(str(argument))
            elif operation.name not in _HARMLESS:
                raise UserError(f"{where}: a pickle that does more than hold a text ({operation.name}); refused")
    except ValueError as error:
        raise UserError(f"{where}: not a pickle of a text ({error})") from error
    if len(texts) != 1:
        raise UserError(f"{where}: a pickle of {len(texts)} texts, where one was expected")
    return texts[0]


_FROM, _UNTIL = date(2024, 8, 1), date(2025, 2, 1)


def read(fields: Fields, where: str) -> Problem | LeftOut:
    """A row; problems of contests before August 2024 or after January 2025 are left out."""
    value = fields.get("contest_date")
    try:
        # ISO text, or a date where a table has types.
        day = date.fromisoformat(str(value)[:10])
    except ValueError as error:
        hint = absent(fields, "contest_date")
        raise UserError(f"{where}: 'contest_date' must be a date as 2024-08-01, got {value!r}{hint}") from error
    if not _FROM <= day <= _UNTIL:
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


def read_humaneval(fields: Fields, where: str) -> Problem:
    """Read a row. The prompt's own definitions, helpers of a few problems among them, are the check's setup."""
    prompt, check = text_field(fields, "prompt", where), text_field(fields, "test", where)
    if "def check(" not in check:
        raise UserError(f"{where}: 'test' must define check(candidate)")
    answer = CodeAnswer(function=text_field(fields, "entry_point", where), check=check, setup=prompt)
    return Problem(prompt.strip(), answer, text_field(fields, "task_id", where))


HUMANEVAL_PLUS = DataSet(
    name="humaneval_plus",
    task="code",
    about="HumanEval+",
    parts=(Part(Source("humaneval_plus", "evalplus/humanevalplus", "test"), read_humaneval),),
    prompt="evalplus",
    licence="Apache-2.0",
    known="code",
    used_by="2510.14807",
    expected=164,
)
