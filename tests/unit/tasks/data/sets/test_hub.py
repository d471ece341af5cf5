"""Sets from a hub, by the real libraries: a repository with configurations and splits, and one of plain files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import HANG_S

from megasharp.tasks.sets import SETS
from megasharp.tasks.sets.load import load_set
from tests.unit.tasks.data.sets.small_hub import COMMIT, small_hub

FILES = Path(__file__).parents[1] / "files" / "sets"
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
"""
# The commit that is pinned for GSM8K is another than the small hub's, which answers for any.
SCRIPT = """
import json, sys
from megasharp.common.exit_codes import run_command
from megasharp.tasks.sets.load import load_set
def load():
    for name in ("gsm8k", "gsm8k_test", "livecodebench"):
        items = load_set(name, say=lambda line: None).items
        print(json.dumps([[item.id, item.text, repr(item.answer)] for item in items]))
run_command(load)
"""


@pytest.fixture
def repositories(tmp_path: Path) -> Path:
    gsm8k = tmp_path / "openai" / "gsm8k"
    for folder in ("main", "socratic"):
        (gsm8k / folder).mkdir(parents=True)
    (gsm8k / "README.md").write_text(CARD)
    rows = (FILES / "gsm8k.jsonl").read_text().splitlines(keepends=True)
    (gsm8k / "main" / "train-00000-of-00001.jsonl").write_text("".join(rows[:7]))
    (gsm8k / "main" / "test-00000-of-00001.jsonl").write_text("".join(rows[7:]))
    (gsm8k / "socratic" / "train-00000-of-00001.jsonl").write_text(rows[0])
    lite = tmp_path / "livecodebench" / "code_generation_lite"
    lite.mkdir(parents=True)
    (lite / "code_generation_lite.py").write_text("raise SystemExit('the loading script ran')\n")
    tests = (FILES / "livecodebench.jsonl").read_text().splitlines(keepends=True)
    (lite / "test4.jsonl").write_text("".join(tests[:1]))
    (lite / "test5.jsonl").write_text("".join(tests[1:]))
    return tmp_path


def run(cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=HANG_S
    )


def test_what_was_fetched_once_is_there_without_the_hub(repositories: Path, tmp_path: Path) -> None:
    """And it is what files with the same rows give."""
    cache = tmp_path / "cache"
    with small_hub(repositories) as address:
        fetched = run(cache, HF_HUB_OFFLINE="0", HF_ENDPOINT=address)
    assert fetched.returncode == 0, fetched.stderr[-2000:]
    train, test, code = (json.loads(line) for line in fetched.stdout.splitlines()[-3:])
    assert [len(train), len(test), len(code)] == [7, 3, 2]
    local = [[i.id, i.text, repr(i.answer)] for i in load_set("livecodebench", FILES / "livecodebench.jsonl").items]
    assert code == local
    assert train == [
        [item.id, item.text, repr(item.answer)] for item in load_set("gsm8k", FILES / "gsm8k.jsonl").items[:7]
    ]
    again = run(cache, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr[-2000:]
    assert again.stdout.splitlines()[-3:] == fetched.stdout.splitlines()[-3:]
    assert SETS["gsm8k"].parts[0].source.revision


OWN = """
import json, sys
from pathlib import Path
from megasharp.common.errors import UserError
from megasharp.tasks.sets.row_sources import commit_read, own_rows
for name, split, config, revision in json.loads(sys.argv[1]):
    try:
        print(json.dumps([fields["question"] for _, fields in own_rows(Path(name), split, config, revision)]))
    except UserError as error:
        print(json.dumps(str(error)))
print(json.dumps({str(each[3]): commit_read("openai/gsm8k", each[3]) for each in json.loads(sys.argv[1])}))
"""


def test_own_rows_come_from_the_hub_by_their_id(repositories: Path, tmp_path: Path) -> None:
    """Of several configurations main is meant; a hub that does not answer leaves what was fetched before."""
    asked = [
        ("openai/gsm8k", None, None, None),
        ("openai/gsm8k", "test", "main", None),
        ("openai/gsm8k", None, "socratic", None),
        ("openai/gsm8k", "dev", "main", None),
        ("openai/gsm8k", None, "mian", None),
        ("openai/gsm9k", None, None, None),
    ]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def answers(address: str) -> list[object]:
        done = subprocess.run(
            [sys.executable, "-c", OWN, json.dumps(asked)],
            env={**environment, "HF_ENDPOINT": address}, capture_output=True, text=True, check=True, timeout=HANG_S,
        )  # fmt: skip
        return [json.loads(line) for line in done.stdout.splitlines()]

    with small_hub(repositories) as address:
        train, test, socratic, *errors, commit = answers(address)
    questions = [json.loads(line)["question"] for line in (FILES / "gsm8k.jsonl").read_text().splitlines()]
    assert commit == {"None": COMMIT}
    assert (train, test, socratic) == (questions[:7], questions[7:], questions[:1])
    for error, said in zip(
        errors,
        (
            """data set openai/gsm8k: Unknown split "dev". Should be one of ['train', 'test']. (data.split""",
            "data set openai/gsm8k: BuilderConfig 'mian' not found. Available: ['main', 'socratic'] (data.split",
            "openai/gsm9k: no such file or folder here, and no such data set on the hub",
        ),
        strict=True,
    ):
        assert str(error).startswith(said)
    # The discard port: nothing listens.
    *again, _, _, error, kept = answers("http://127.0.0.1:9")
    assert (again, kept) == ([train, test, socratic], {"None": COMMIT})
    # A newer commit in the cache, as of another run, is not taken for the one that is asked for.
    (kept_one,) = (tmp_path / "cache" / "datasets").glob(f"*/main/0.0.0/{COMMIT}")
    newer = shutil.copytree(kept_one, kept_one.with_name("2" * 40))
    os.utime(newer, (time.time() + 60,) * 2)
    asked[3:] = [("openai/gsm8k", None, "main", commit) for commit in (COMMIT, "2" * 40, "3" * 40)]
    *same, missing, read = answers("http://127.0.0.1:9")
    assert same == [train, test, socratic, train, train] and "revision 333" in str(missing)
    assert read == {"None": COMMIT, COMMIT: COMMIT, "2" * 40: "2" * 40, "3" * 40: None}
    assert "openai/gsm9k is not in the cache" in str(error) and "the hub cannot be reached (http://127.0.0.1:9" in str(
        error
    )
