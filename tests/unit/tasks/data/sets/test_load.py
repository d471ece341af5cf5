"""Sources of rows: files and folders of every kind, the hub's library, and the messages where there are none."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case
from waiting import HANG_S

from megasharp.common.errors import UserError
from megasharp.tasks.prompts import template_named
from megasharp.tasks.sets import SETS
from megasharp.tasks.sets.data_set import Part, Source
from megasharp.tasks.sets.load import load_set
from megasharp.tasks.sets.row_sources import files_of

FILES = Path(__file__).parents[1] / "files" / "sets"
GSM8K = FILES / "gsm8k.jsonl"
ROWS = [json.loads(line) for line in GSM8K.read_text().splitlines()]


def ids(path: Path, name: str = "gsm8k") -> list[str]:
    return [item.id for item in load_set(name, path).items]


def test_every_kind_of_file_gives_the_same_problems(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "b.json").write_text(json.dumps({"canary": "x", "examples": ROWS}))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(GSM8K.read_bytes()))
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    for name in ("a.json", "b.json", "c.jsonl.gz", "d.json.gz"):
        assert ids(tmp_path / name) == ids(GSM8K)


def test_of_a_folder_the_part_and_the_split_are_read(tmp_path: Path) -> None:
    """As in a copy of openai/gsm8k: main/train-00000-of-00001, main/test-..., socratic/..."""
    for name in ("main/train-0.jsonl", "main/test-0.jsonl", "socratic/train-0.jsonl", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    source = SETS["gsm8k"].parts[0].source
    assert files_of(tmp_path, source, alone=True) == [tmp_path / "main" / "train-0.jsonl"]
    assert files_of(tmp_path, replace(source, split="test"), alone=True) == [tmp_path / "main" / "test-0.jsonl"]
    assert files_of(tmp_path, Source("other", "x/other", "validation"), alone=True) == [
        tmp_path / name for name in ("main/test-0.jsonl", "main/train-0.jsonl", "socratic/train-0.jsonl")
    ]


def test_a_copy_of_a_repository_may_write_its_parts_small(tmp_path: Path) -> None:
    """opencompass/AIME2025 has the files aime2025-I.jsonl and aime2025-II.jsonl."""
    for part in ("I", "II"):
        rows = (FILES / "aime25" / f"AIME2025-{part}.jsonl").read_text()
        (tmp_path / f"aime2025-{part}.jsonl").write_text(rows)
    assert ids(tmp_path, "aime25") == ids(FILES / "aime25", "aime25")


def test_files_of_a_folder_are_one_table_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number, rows in enumerate((ROWS[:4], ROWS[4:])):
        (tmp_path / f"train-{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert ids(tmp_path) == ids(GSM8K)


def test_one_file_may_hold_the_parts_of_a_set_that_are_read_alike() -> None:
    assert ids(FILES / "aime25" / "AIME2025-I.jsonl", "aime25") == [f"aime25/{number}" for number in range(5)]


def test_rows_that_are_there_twice_are_told_and_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETS, "gsm8k", replace(SETS["gsm8k"], expected=None))
    said: list[str] = []
    load_set("gsm8k", GSM8K, say=said.append)
    assert said == []
    path = tmp_path / "twice.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS + ROWS[:3])))
    items = load_set("gsm8k", path, say=said.append).items
    assert said == [f"gsm8k: 3 of 13 problems in {path} repeat the question of one before"]
    assert len({item.id for item in items}) == 13, "metrics are kept by id"


@each_case(("name", "empty"), [("aime25", "AIME2025-I"), ("aime25", "AIME2025-II")])
def test_a_part_without_a_row_is_named(name: str, empty: str, tmp_path: Path) -> None:
    for file in (FILES / name).iterdir():
        (tmp_path / file.name).write_text("" if file.stem == empty else file.read_text())
    with pytest.raises(UserError, match=f"{empty}.jsonl: no row of {empty}, which this set has beside") as caught:
        load_set(name, tmp_path)
    assert "\n" not in str(caught.value)


@each_case(
    ("name", "path", "message"),
    [
        ("gsm8k", "nowhere.jsonl", "no such file or folder; path names a parquet or JSON file"),
        ("gsm8k", "empty", "no data file in this folder"),
        ("gsm8k", "rows.tsv", "unknown kind of file; it must end in one of .parquet"),
        ("gsm8k", "broken.parquet", "cannot read this parquet file"),
        ("gsm8k", "broken.json", "cannot read this JSON file"),
        ("gsm8k", "number.json", "a list of rows must stand here"),
        ("gsm8k", "numbers.json", "numbers.json, row 1: not a JSON object"),
        ("gsm8k", "broken.jsonl.gz", "cannot read this file"),
        ("gsm8k", "broken.jsonl", "broken.jsonl:1: not a JSON object"),
        ("gsm8k", "blank.jsonl", r"blank.jsonl: no problem of gsm8k \(there are no rows\)"),
        ("gsm8k_math_level1", "blank.jsonl", "this set has several parts; give a folder with a file or folder called"),
        ("gsm8k_math_level1", "empty", "no file or folder called gsm8k"),
        ("gsm8", "blank.jsonl", "no data set 'gsm8'; did you mean gsm8k"),
        ("math500", "twice.jsonl", "the id 'math500/a' appears twice"),
        ("math_levels_3to5", "easy.jsonl", r"no problem of math_levels_3to5 \(1 rows: another level\)"),
    ],
)
def test_what_cannot_be_read_is_one_line(name: str, path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for file, text in {
        "rows.tsv": "a,b",
        "broken.parquet": "PAR1",
        "broken.json": "[",
        "number.json": "3",
        "numbers.json": "[3]",
        "broken.jsonl.gz": "x",
        "broken.jsonl": "{",
        "blank.jsonl": "\n",
        "twice.jsonl": '{"problem": "p", "answer": "1", "unique_id": "a"}\n' * 2,
        "easy.jsonl": '{"problem": "p", "solution": "s", "level": "Level 1"}\n',
    }.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_set(name, tmp_path / path)
    assert "\n" not in str(caught.value)


def test_a_prompt_that_there_is_not_names_near_ones() -> None:
    with pytest.raises(UserError, match="no template 'boxed_chatm'; did you mean boxed_chatml"):
        load_set("gsm8k", GSM8K, "boxed_chatm")


@pytest.fixture
def as_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real library of the hub, on a repository that lies on disk in the place of openai/gsm8k."""
    repository = tmp_path / "repository"
    (repository / "main").mkdir(parents=True)
    (repository / "main" / "train.jsonl").write_bytes(GSM8K.read_bytes())
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    chosen = SETS["gsm8k"]
    source = replace(chosen.parts[0].source, hub=str(repository / "main"), config=None, revision=None)
    monkeypatch.setitem(SETS, "gsm8k", replace(chosen, parts=(Part(source, chosen.parts[0].read),), expected=10))
    return repository


def test_rows_from_the_hub_are_those_of_the_file(as_hub: Path) -> None:
    said: list[str] = []
    items = load_set("gsm8k", say=said.append).items
    local = load_set("gsm8k", GSM8K).items
    assert [(item.id, item.text, item.answer) for item in items] == [(i.id, i.text, i.answer) for i in local]
    assert said == []


def test_another_number_of_problems_is_told(as_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setitem(SETS, "gsm8k", replace(SETS["gsm8k"], expected=12, tolerance=0.1))
    load_set("gsm8k", say=said.append)
    assert len(said) == 1 and "12 problems are expected" in said[0] and "10 were found" in said[0]
    load_set("gsm8k", GSM8K, say=said.append)
    assert len(said) == 2 and said[1].endswith(f"10 were found in {GSM8K}"), "a file may be cut on purpose"
    monkeypatch.setitem(SETS, "gsm8k", replace(SETS["gsm8k"], expected=11, tolerance=0.1))
    load_set("gsm8k", say=said.append)
    load_set("gsm8k", GSM8K, say=said.append)
    assert len(said) == 2, "within the tolerance"


@each_case("rows", [14_042, 14_053, 14_116])
def test_the_papers_counts_of_dapo_in_english_are_within_the_tolerance(rows: int) -> None:
    """2511.19942 says 14,053 and 14,042; open-r1's configuration en has 14,116."""
    chosen = SETS["dapo_math_17k_en"]
    assert chosen.expected is not None
    assert abs(rows - chosen.expected) <= chosen.tolerance * chosen.expected
    assert abs(17_398 - chosen.expected) > chosen.tolerance * chosen.expected


def test_without_a_hub_one_line_says_how_to_go_on(tmp_path: Path) -> None:
    """In a process of its own: the library reads its settings when it is imported. A table, and files by name."""
    script = (
        "from megasharp.common.exit_codes import run_command\nfrom megasharp.tasks.sets.load import load_set\n"
        "for name in ('gsm8k', 'livecodebench'):\n"
        "    try: run_command(lambda: load_set(name))\n"
        "    except SystemExit as end: assert end.code == 2\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("megasharp:")]
    assert len(told) == 2 and "Traceback" not in done.stderr
    for line, hub in zip(told, ("openai/gsm8k (main)", "livecodebench/code_generation_lite"), strict=True):
        assert f"data set {hub} is not in the cache (HF_HOME, {tmp_path}) and the hub is off (HF_HUB_OFFLINE)" in line
        assert "give path: a parquet or JSON file" in line


def test_earlier_messages_stay_and_columns_travel(tmp_path: Path) -> None:
    """A row's own system message counts, not the template's; a template that is a text asks the question alone."""
    talk = [("user", "1+1?"), ("assistant", "2"), ("user", "And 2+2?")]
    rows = [
        {"prompt": [{"role": role, "content": text} for role, text in turns], "reward_model": {"ground_truth": "4"}}
        for turns in ([("system", "Be brief."), *talk], talk)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own, without = load_set("verl_math", tmp_path / "rows.jsonl", "boxed_chat").items
    template = template_named("boxed_chat").turns_of("And 2+2?")
    assert own.turns == (("system", "Be brief."), *talk[:2], template[-1])
    assert without.turns == (*template[:-1], *talk[:2], template[-1])
    assert own.row == rows[0]
    own, _ = load_set("verl_math", tmp_path / "rows.jsonl", "plain").items
    assert (own.turns, own.text) == ((), "And 2+2?")
