"""Where paths lead: beside their file, from the working directory, then to what megasharp ships."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import each_case
from pydantic import BaseModel

from megasharp.cli.quickstart import write_quickstart
from megasharp.common.errors import UserError
from megasharp.config import core
from megasharp.config.core import PRESETS, SHIPPED, find, read_tree
from megasharp.config.run_config import PATH_KEYS, RunConfig, load_run, with_paths_beside
from megasharp.evals.groups import load_group
from megasharp.evals.suites import load_suite

RUN = "name: r\nsteps: 1\nmodel: {path: m}\ndata: {task: countdown, path: d.jsonl}\n"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a run file, `run`, and a working directory, `here`, which is the current one; both are empty."""
    for name in ("run", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_the_nearest_place_counts(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "SHIPPED", places / "shipped")
    monkeypatch.setattr(core, "PRESETS", places / "shipped" / "configs")
    beside, written = places / "run", Path("a/b.yaml")
    assert find("a/b.yaml", beside) == written, "what is nowhere is as it was written"
    # From the last place to the first.
    for place in (places / "shipped" / "configs", places / "shipped", Path(), beside):
        (place / "a").mkdir(parents=True)
        (place / "a" / "b.yaml").touch()
        assert find("a/b.yaml", beside) == place / written
    assert find("a/b.yaml") == written
    assert find(str(beside / "a/b.yaml")) == beside / "a/b.yaml"


@each_case("include", ["algo/kl.yaml", "configs/algo/kl.yaml"])
def test_a_preset_is_included_from_anywhere(places: Path, include: str) -> None:
    (places / "run/run.yaml").write_text(f"include: [{include}]\n{RUN}")
    preset = read_tree(PRESETS / "algo" / "kl.yaml")
    assert read_tree(places / "run/run.yaml")["recipe"] == preset["recipe"]
    (places / "run" / include).parent.mkdir(parents=True)
    (places / "run" / include).write_text("recipe: {methods: [gspo]}\n")
    assert read_tree(places / "run/run.yaml")["recipe"] == {"methods": ["gspo"]}, "the file beside comes first"


def test_a_missing_include_is_still_named(places: Path) -> None:
    (places / "run/run.yaml").write_text("include: [configs/algo/capsp.yaml]\n")
    with pytest.raises(UserError, match=r"no file configs/algo/capsp\.yaml in .*; is it configs/algo/casp\.yaml\?"):
        read_tree(places / "run/run.yaml")


def test_paths_beside_the_run_file_are_found_from_elsewhere(places: Path) -> None:
    (places / "run/m").mkdir()
    (places / "run/mine.yaml").touch()
    (places / "here/d.jsonl").touch()
    (places / "run/run.yaml").write_text(f"{RUN}eval: {{suites: [mine.yaml, countdown_test]}}\n")
    run = load_run(places / "run/run.yaml")
    assert run.model.path == str(places / "run/m")
    assert run.data.path == "d.jsonl", "what the working directory has stays as written"
    assert run.eval.suites == [str(places / "run/mine.yaml"), "countdown_test"]
    assert load_run(places / "run/run.yaml", ["model.path=m"]).model.path == "m", "an override is of the command's"


def test_only_a_run_that_is_loaded_gets_paths_beside_its_file(places: Path) -> None:
    """A stored configuration is read as it was written."""
    (places / "run/m").mkdir()
    (places / "run/config.yaml").write_text(RUN)
    assert read_tree(places / "run/config.yaml")["model"] == {"path": "m"}


def test_a_run_file_in_the_working_directory_keeps_its_words(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (places / "run/m").mkdir()
    (places / "run/run.yaml").write_text(RUN)
    monkeypatch.chdir(places / "run")
    assert load_run(Path("run.yaml")).model.path == "m"


@each_case("tree", [{"model": 3}, {"model": {"path": 3}}, {"model": {"path": ""}}, {"eval": {"suites": [1, None]}}])
def test_what_is_no_path_is_left_to_the_schema(places: Path, tree: dict[str, Any]) -> None:
    assert with_paths_beside(tree, places / "run/run.yaml") == tree


@each_case("key", PATH_KEYS)
def test_every_key_of_a_path_is_one_of_a_run(key: str) -> None:
    table: Any = RunConfig
    for part in key.split("."):
        assert part in table.model_fields, key
        inner = table.model_fields[part].annotation
        table = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def test_a_shipped_run_suite_and_model_have_names(places: Path) -> None:
    assert load_run(Path("configs/algo/paper/casp_logic_qwen2.5-7b.yaml")).name == "casp_logic_qwen2.5-7b"
    assert load_suite("countdown_test", limit=2).items
    assert load_group("casp_math6") is not None
    assert find("examples/quickstart/base") == SHIPPED / "examples/quickstart/base"


def test_the_quickstart_is_written(places: Path) -> None:
    said: list[str] = []
    write_quickstart(Path("my first"), said.append)
    assert said[-1] == "next: megasharp train 'my first/run.yaml'"
    run = load_run(Path("my first/run.yaml"))
    folder = places / "here" / "my first"
    assert run.model.path == str(folder / "base") and run.data.path == str(folder / "data/train.jsonl")
    assert Path(run.model.path, "model.safetensors").is_file() and Path(run.data.path).is_file()
    with pytest.raises(UserError, match="--out my first is not empty"):
        write_quickstart(Path("my first"), said.append)
    Path("file").touch()
    with pytest.raises(UserError, match="--out file cannot be written"):
        write_quickstart(Path("file"), said.append)
