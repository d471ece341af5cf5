"""Every key of a file that a user writes says what it does, and `megasharp config` prints it."""

from __future__ import annotations

import json

import pytest
from cases import each_case
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from megasharp.algos import METHODS
from megasharp.cli.main import app
from megasharp.common.errors import UserError
from megasharp.common.section import Section
from megasharp.config.core import parse_yaml, validate
from megasharp.config.key_texts import config_text, editor_schema
from megasharp.config.run_config import RunConfig
from megasharp.config.schema_keys import described_keys
from megasharp.evals.groups import SuiteGroup
from megasharp.evals.suites import SuiteFile
from megasharp.reporting.sweeps.grid import SweepConfig
from megasharp.tasks.reasoning_gym import GymFile

FILES = (RunConfig, SweepConfig, SuiteFile, SuiteGroup, GymFile)
REQUIRED = {"name": "r", "steps": 1, "model": {"path": "m"}, "data": {"task": "countdown", "path": "p"}}


def undescribed(table: type[BaseModel]) -> list[str]:
    """The keys of `table`, and of the tables below it, without a description of at least one sentence."""
    texts = {key: owner.model_fields[name].description or "" for key, (owner, name) in described_keys(table)}
    return [key for key, text in texts.items() if not text.endswith(".")]


@each_case("table", [*FILES, *(method.Params for method in METHODS.values())])
def test_every_key_is_described(table: type[Section]) -> None:
    assert undescribed(table) == []


class Inner(Section):
    told: int = Field(default=1, description="Number of things.")
    untold: int = 1


class Outer(Section):
    plain: str | None = None
    listed: list[Inner] = Field(default=[], description="Several.")
    named: dict[str, Inner] = Field(default={}, description="no sentence")
    either: float | Inner = Field(default=0.0, description="A number or a table.")


def test_a_key_without_description_is_found_wherever_it_stands() -> None:
    assert undescribed(Outer) == ["plain", "listed.untold", "named", "named.untold", "either.untold"]


def test_the_tree_reads_back_as_the_defaults() -> None:
    tree = parse_yaml(config_text(), "config")
    assert {key for key, value in tree.items() if value is None} == {"name", "steps", "token_budget"}
    run = validate(RunConfig, {**tree, **REQUIRED}, "config")
    assert run == validate(RunConfig, REQUIRED, "required")


@each_case(
    ("key", "lines"),
    [
        ("policy.tp", ("  type     integer >= 1", "  default  1", "Number of ranks that share each layer")),
        ("policy.transformer_engine", ("  type     auto, true or false", "  default  auto")),
        ("policy.lora", ("  type     table (rank, alpha, targets) or null", "  default  null", "rank:  # required")),
        (
            "policy.optimizer",
            ("  type     table (lr, betas, eps, weight_decay, clip_grad, warmup_steps, ...)\n\n", "lr: 1e-06"),
        ),
        ("recipe.dlc.mu", ("  type     number >= 0 or table (start, end, steps, shape)", "  default  0.2")),
        ("recipe.dr_grpo", ("dr_grpo has no options: advantages are",)),
        ("data.stages.until", ("  type     integer >= 1 or null",)),
        (
            "log.rollouts",
            ("  type     table (keep_last, every, tokens, tokens_keep_last) or null\n\n", "keep_last: 1000"),
        ),
        ("steps", ("  default  none, the key is required",)),
        ("eval.k", ("  type     list of integers", "  default  [1, 4, 16, 64]")),
    ],
)
def test_one_key_is_told_with_type_default_and_text(key: str, lines: tuple[str, ...]) -> None:
    text = config_text(key)
    assert text.startswith(f"{key}\n")
    for line in lines:
        assert line in text


@each_case(
    ("key", "message"),
    [
        ("polcy.tp", "config: no key is called 'polcy.tp'; nearest is policy.tp"),
        ("tp", "config: no key is called 'tp'; its full name is policy.tp or rollout.tp"),
        ("§", "config: no key is called '§'; `megasharp config` prints all"),
    ],
)
def test_an_unknown_key_is_refused_with_a_close_one(key: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        config_text(key)
    assert str(refused.value) == message


def test_the_schema_for_editors_knows_includes_and_requires_nothing() -> None:
    schema = editor_schema()
    assert next(iter(schema["properties"])) == "include"
    assert schema["additionalProperties"] is False
    tables = (schema, *schema["$defs"].values())
    assert not any("required" in table for table in tables)
    assert all("description" in key for table in tables for key in table["properties"].values())


def test_the_command_prints_what_is_asked() -> None:
    for command in ([], ["policy.tp"]):
        done = CliRunner().invoke(app, ["config", *command])
        assert (done.exit_code, done.stdout) == (0, config_text(*command) + "\n")
    done = CliRunner().invoke(app, ["config", "--json-schema"])
    assert json.loads(done.stdout) == json.loads(json.dumps(editor_schema()))
    assert isinstance(CliRunner().invoke(app, ["config", "policy.tp", "--json-schema"]).exception, UserError)
