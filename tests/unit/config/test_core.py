"""Strict loading: unknown keys, includes, overrides, numbers; every mistake one line with file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from cases import each_case
from pydantic import Field

from megasharp.common.errors import UserError
from megasharp.common.section import Section
from megasharp.config.core import apply_overrides, dump_yaml, merge, parse_yaml, read_tree, validate
from megasharp.config.run_config import load_run


class Inner(Section):
    depth: int = 1
    rate: float = Field(default=0.5, gt=0.0)


class Outer(Section):
    name: str
    inner: Inner = Inner()
    tags: list[str] = []


@each_case(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        ("1.0e-6", 1e-6),
        (".5", 0.5),
        ("3.", 3.0),
        ("7", 7),
        ("1e", "1e"),
        ("e4", "e4"),
        ("1.2.3", "1.2.3"),
        ("true", True),
        ("null", None),
        ("[1, 2e-1]", [1, 0.2]),
    ],
)
def test_values_as_people_mean_them(text: str, value: object) -> None:
    parsed = parse_yaml(text, "here")
    assert parsed == value and type(parsed) is type(value)


def test_a_changed_tree_changes_no_other_of_the_same_text() -> None:
    """A text is parsed once in a process."""
    changed = parse_yaml("policy: {tp: 1}", "here")
    changed["policy"]["tp"] = 2
    assert parse_yaml("policy: {tp: 1}", "there") == {"policy": {"tp": 1}}


def test_merge_is_by_key_and_leaves_its_inputs() -> None:
    base, over = {"a": {"x": 1, "y": 2}, "b": [1, 2]}, {"a": {"y": 3}, "b": [9], "c": 0}
    assert merge(base, over) == {"a": {"x": 1, "y": 3}, "b": [9], "c": 0}
    assert merge({"a": {"x": 1}}, {"a": None}) == {"a": None}
    assert base == {"a": {"x": 1, "y": 2}, "b": [1, 2]} and over == {"a": {"y": 3}, "b": [9], "c": 0}


def test_later_includes_win_and_the_file_wins_over_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "parts").mkdir(parents=True)
    (tmp_path / "first.yaml").write_text("a: 1\nb: 1\nt: {x: 1, y: 1, z: 1}\n")
    (tmp_path / "run/parts/second.yaml").write_text("include: [deep.yaml]\nb: 2\nt: {y: 2}\n")
    (tmp_path / "run/parts/deep.yaml").write_text("b: 0\nd: 4\n")
    (tmp_path / "run/run.yaml").write_text("include: [first.yaml, parts/second.yaml]\nt: {z: 3}\n")
    monkeypatch.chdir(tmp_path)
    assert read_tree(Path("run/run.yaml")) == {"a": 1, "b": 2, "d": 4, "t": {"x": 1, "y": 2, "z": 3}}


@each_case(
    ("text", "message"),
    [
        ("include: [run.yaml]", "include leads back to itself"),
        ("include: [gone.yaml]", r"run.yaml: include: no file gone.yaml in .*, in the working directory, or among"),
        ("include: 3", "run.yaml: include: expected a list of file names"),
        ("- 1\n- 2\n", r"run.yaml: expected a table of keys, found \[1, 2\]"),
        ("a: [1\nb: 2", "run.yaml: not valid YAML"),
        ("", "run.yaml: expected a table of keys, found an empty file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as refused:
        read_tree(tmp_path / "run.yaml")
    assert "\n" not in str(refused.value)


def test_overrides_by_dotted_path() -> None:
    tree = {"inner": {"depth": 1}, "name": "a"}
    changed = apply_overrides(tree, ["inner.rate=1e-4", "tags=[a, b]", "name=x=y", "inner.depth=3", "inner.depth=4"])
    assert changed == {"inner": {"depth": 4, "rate": 1e-4}, "name": "x=y", "tags": ["a", "b"]}
    assert tree == {"inner": {"depth": 1}, "name": "a"}


@each_case("item", ["policy.tp", "=3", "a..b=1", ".a=1", "a.=1"])
def test_overrides_of_another_form(item: str) -> None:
    with pytest.raises(UserError, match="expected key=value with a dotted key"):
        apply_overrides({}, [item])


@each_case(
    ("tree", "message"),
    [
        (
            {"nmae": "a", "name": "a"},
            "run.yaml: nmae: unknown key, nearest is name; known keys here: name, inner, tags",
        ),
        (
            {"name": "a", "inner": {"dpeth": 1}},
            "run.yaml: inner.dpeth: unknown key, nearest is depth; known keys here: depth, rate",
        ),
        ({}, "run.yaml: name: this key is required$"),
        (
            {"name": "a", "inner": {"depth": "3"}},
            'run.yaml: inner.depth: expected integer, found "3"; write it without quotes',
        ),
        ({"name": "a", "inner": {"depth": True}}, "run.yaml: inner.depth: expected integer, found true"),
        ({"name": "a", "inner": {"rate": -1.0}}, "run.yaml: inner.rate: expected number > 0, found -1.0"),
        ({"name": 3, "inner": {"depth": "x"}}, 'run.yaml: name: expected string, found 3; write "3" \\(and 1 more\\)'),
    ],
)
def test_mistakes_name_file_and_key(tree: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        validate(Outer, tree, "run.yaml")
    assert "\n" not in str(refused.value)


def test_written_configuration_reads_the_same() -> None:
    section = validate(Outer, {"name": "ä", "inner": {"rate": 1e-5}, "tags": ["1e-4"]}, "here")
    assert validate(Outer, parse_yaml(dump_yaml(section), "there"), "there") == section


@each_case("text", [".inf", "-.inf", ".nan"])
def test_a_number_that_is_not_finite_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: r\nsteps: 1\nmodel: {path: m}\ndata: {task: t}\n")
    with pytest.raises(UserError, match=r"recipe\.kl\.coefficient"):
        load_run(file, [f"recipe.kl.coefficient={text}"])


class Ramp(Section):
    start: float
    end: float


class Step(Section):
    at: int


class Empty(Section):
    pass


class Unions(Section):
    nothing: Empty = Empty()
    rate: Annotated[float, Field(ge=0.0)] | Ramp = 0.1
    steps: list[Step] = []
    overlap: Literal["auto"] | bool = "auto"


@each_case(
    ("override", "message"),
    [
        ("rate=-1", "f.yaml: rate: expected number >= 0 or table (start, end), found -1"),
        ("nothing.some=1", "f.yaml: nothing.some: unknown key; this table has no keys"),
        ("rate=high", 'f.yaml: rate: expected number >= 0 or table (start, end), found "high"'),
        ("rate={start: 1, end: high}", 'f.yaml: rate.end: expected number, found "high"'),
        ("rate={start: 1}", "f.yaml: rate.end: this key is required"),
        ("rate={start: 1, end: 2, step: 3}", "f.yaml: rate.step: unknown key; known keys here: start, end"),
        ("rate={begin: 1, end: 2}", "f.yaml: rate.begin: unknown key; known keys here: start, end (and 1 more)"),
        ("steps=[{at: 1}, {et: 2, at: 2}]", "f.yaml: steps.1.et: unknown key; known keys here: at"),
        ("overlap=maybe", 'f.yaml: overlap: expected auto, true or false, found "maybe"'),
        ("overlap=[1]", "f.yaml: overlap: expected auto, true or false, found [1]"),
        ("steps=[{at: 1}, {at: x}]", 'f.yaml: steps.1.at: expected integer, found "x"'),
    ],
)
def test_a_mistake_in_a_union_or_a_list_names_the_users_key(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(Unions, apply_overrides({}, [override]), "f.yaml")
    assert str(caught.value) == message
