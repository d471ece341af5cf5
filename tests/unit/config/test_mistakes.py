"""Every mistake that a schema can refuse is one line in our own words: the key, what is allowed, what was found."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from cases import each_case
from pydantic import BaseModel

from megasharp.common.errors import UserError
from megasharp.common.section import Section
from megasharp.config.core import apply_overrides, merge, parse_yaml, validate
from megasharp.config.run_config import RunConfig, load_run
from megasharp.config.schema_keys import PATTERNS, tables_in
from megasharp.evals.groups import SuiteGroup
from megasharp.evals.suites import SuiteFile
from megasharp.reporting.sweeps.grid import SweepConfig
from megasharp.tasks.reasoning_gym import GymFile

REQUIRED = {"name": "r", "steps": 1, "model": {"path": "m"}, "data": {"task": "countdown", "path": "p"}}
# A file of each kind that is valid, which a mistake is laid over.
FILES: dict[type[Section], dict[str, Any]] = {
    RunConfig: REQUIRED,
    SweepConfig: {"name": "s", "run": "r.yaml"},
    SuiteFile: {"task": "countdown", "path": "p"},
    SuiteGroup: {"source": "s", "settings": {}, "suites": ["a"]},
    GymFile: {"datasets": [{"name": "a"}]},
}
ODD = (None, "1e-4", -1, 1.5, float("nan"), datetime.date(2026, 1, 2), [], [1, "x"], {1: 2})
# Words of pydantic that must not reach a user.
THEIRS = re.compile(r"Input should|Value error|validation error|type=|valid dictionary|instance of|Config\b|Params\b")


def places(table: type[BaseModel], wrap: Any = lambda inner: inner) -> Iterator[tuple[str, Any]]:
    """Yield every key below `table` with a function that puts a value there, into the tables and lists around it."""
    for name, field in table.model_fields.items():

        def at(value: Any, name: str = name, wrap: Any = wrap) -> Any:
            return wrap({name: value})

        yield name, at
        kinds = {get_origin(field.annotation), *(get_origin(each) for each in get_args(field.annotation))}
        for inner in tables_in(field.annotation):

            def below(value: Any, at: Any = at, kinds: Any = kinds) -> Any:
                return at([value] if list in kinds else {"given": value} if dict in kinds else value)

            yield from places(inner, below)


@each_case("schema", FILES)
def test_no_mistake_anywhere_speaks_of_the_library_that_found_it(schema: type[Section]) -> None:
    refused = 0
    for name, put in places(schema):
        for value in ODD:
            try:
                validate(schema, merge(FILES[schema], put(value)), "f.yaml")
            except UserError as error:
                refused += 1
                text = str(error)
                assert re.match(r"f\.yaml: \S", text) and "\n" not in text, text
                assert not THEIRS.search(text), f"{name}={value!r}: {text}"
    assert refused > 4 * len(list(places(schema)))


@each_case(
    ("override", "message"),
    [
        ("recipe.methods=grpo", 'recipe.methods: expected list of strings, found "grpo"; write [grpo]'),
        (
            "name=my run",
            'name: expected string of letters, digits and . _ + - that begins with a letter or digit, found "my run"',
        ),
        (
            "name=7",
            "name: expected string of letters, digits and . _ + - that begins with a letter or digit, "
            'found 7; write "7"',
        ),
        ("steps=", "steps: expected integer >= 1, found null; give it a value, or leave the key out"),
        ("eval.k=4", "eval.k: expected list of integers, found 4; write [4]"),
        ("steps='10'", 'steps: expected integer >= 1, found "10"; write it without quotes'),
        ("steps=1.5", "steps: expected integer >= 1, found 1.5"),
        ("policy.optimizer.lr=-1", "policy.optimizer.lr: expected number > 0, found -1"),
        ("policy.optimizer.lr=.nan", "policy.optimizer.lr: expected finite number > 0, found NaN"),
        ("policy.optimizer.betas=[0.9]", "policy.optimizer.betas: expected list of 2 numbers, found [0.9]"),
        ("policy.head=chunkd", 'policy.head: expected logits or chunked, found "chunkd"; nearest is chunked'),
        ("policy.lora=8", "policy.lora: expected table (rank, alpha, targets) or null, found 8"),
        ("policy=[1]", "policy: expected table (device, dp, tp, pp, vpp, cp, ...), found [1]"),
        ("policy={1: 2}", "policy: expected names as keys, found 1; write it in quotes"),
        (
            "policy.megatron={a: [1]}",
            "policy.megatron.a: expected integer, number, true, false, string or null, found [1]",
        ),
        ("checkpoint.asynchronous=maybe", 'checkpoint.asynchronous: expected true or false, found "maybe"'),
    ],
)
def test_mistakes_that_people_make(override: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        validate(RunConfig, apply_overrides(REQUIRED, [override]), "f.yaml")
    assert str(refused.value) == f"f.yaml: {message}"


@each_case(
    ("overrides", "message"),
    [
        ([], "policy.tp: expected integer >= 1, found 0 (line 4, and 2 more)"),
        (["policy.tp=2"], 'policy.optimizer.eps: expected number > 0, found "big" ({}/more.yaml, line 2, and 1 more)'),
        (
            ["policy={tp: x, optimizer: {}}"],
            'policy.tp: expected integer >= 1, found "x" (override policy, and 2 more)',
        ),
        (
            ["policy.tp=2", "policy.optimizer.eps=0.1"],
            'policy.offload.1: expected weights, gradients or optimizer, found "w" (line 6)',
        ),
        (
            ["policy.tp=2", "policy.optimizer.eps=0.1", "policy.offload=[]", "steps="],
            "steps: expected integer >= 1, found null; give it a value, or leave the key out (override steps)",
        ),
    ],
)
def test_a_mistake_is_told_with_the_line_or_the_override_that_made_it(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "include: [more.yaml]\nname: r\nmodel: {path: m}\npolicy: {tp: 0,\n  offload: [weights,\n  w]}\n"
        "steps: 1\ndata: {task: countdown, path: p}\n"
    )
    (tmp_path / "more.yaml").write_text("policy:\n  optimizer: {eps: big}\n")
    with pytest.raises(UserError) as refused:
        load_run(file, overrides)
    assert str(refused.value) == f"{file}: {message.format(tmp_path)}"


@each_case(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "'a' is written twice (line 3)"),
        ("a: b: c\n", "a second ': ' in one line, or an indented line below a value; put texts in quotes (line 1)"),
        ("a:\n\tb: 1\n", "a tab; indent with spaces (line 2)"),
        ("a: 2026-13-45\n", "month must be in 1..12"),
        ("[" * 5000, "maximum recursion depth exceeded"),
    ],
)
def test_text_that_is_no_yaml_is_told_by_its_line(text: str, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_yaml(text, "f.yaml")
    assert str(refused.value).startswith(f"f.yaml: not valid YAML: {problem}")


def test_every_pattern_of_a_schema_has_words() -> None:
    text = "".join(str(schema.model_json_schema()) for schema in FILES)
    assert set(re.findall(r"'pattern': '([^']*)'", text)) == set(PATTERNS)
