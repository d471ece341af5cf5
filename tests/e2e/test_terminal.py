"""Control characters of strangers' texts reach the terminal never raw, whichever command prints them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from hostile_reward import EVIL, SHOWN
from nursery import Nursery
from quickstart import QUICKSTART, REPOSITORY, SMALL
from waiting import HANG_S

from megasharp.common.terminal import visible

RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Shown:
    """Runs commands; what they print on both streams holds no control character."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._streams = [folder / name for name in ("out", "error")]

    def __call__(self, *arguments: str, code: int = 0) -> str:
        ended = self._nursery.run(arguments, REPOSITORY, *self._streams, timeout_s=HANG_S)
        text = "".join(path.read_bytes().decode() for path in self._streams)
        assert ended == code, text
        assert RAW.search(text) is None, f"megasharp {' '.join(arguments)!r} prints {text!r}"
        return text


@pytest.fixture
def shown(nursery: Nursery, tmp_path: Path) -> Shown:
    return Shown(nursery, tmp_path)


@pytest.mark.long("runs")
def test_what_a_run_says(shown: Shown, tmp_path: Path) -> None:
    """Names of files, and an error of its reward; the page and its path."""
    base = shutil.copytree(REPOSITORY / "examples" / "quickstart" / "base", tmp_path / f"base{EVIL}")
    suite = tmp_path / f"suite{EVIL}.yaml"
    problems = REPOSITORY / "examples" / "quickstart" / "data" / "train.jsonl"
    (tmp_path / "few.jsonl").write_text("\n".join(problems.read_text().splitlines()[:4]))
    suite.write_text(f"task: countdown\npath: {tmp_path}/few.jsonl\n")
    names = (f"model.path={json.dumps(str(base))}", f"eval.suites=[{json.dumps(str(suite))}]")
    arguments = ("train", QUICKSTART, "--runs", str(tmp_path), *SMALL, *names)
    more = ("name=a", "steps=1", "eval.n=1", "eval.k=[1]", "reward.function=hostile_reward:judge")
    said = shown(*arguments, *more).replace("\n", "")
    for words in ("ValueError: no reward for ", "suite"):
        assert f"{words}{SHOWN}" in said, words
    assert SHOWN in shown("report", str(tmp_path / "a"), "--out", str(tmp_path / f"{EVIL}.html"))


@pytest.mark.long("runs")
def test_what_is_said_of_stored_runs(shown: Shown, tmp_path: Path) -> None:
    """A configuration with its run's name, what an attempt ended by and where it ran, a folder's name."""
    stored = REPOSITORY / "tests" / "stored" / "2026_11_24" / "runs" / "old"
    first, second = (Path(shutil.copytree(stored, tmp_path / name)) for name in ("a", f"b{EVIL}"))
    config = (first / "config.yaml").read_text()
    for folder, key in ((first, "extra"), (second, "further")):
        named = re.sub("^name: .*$", lambda _: f"name: {json.dumps(EVIL)}", config, flags=re.MULTILINE)
        (folder / "config.yaml").write_text(f"{named}{key}: {json.dumps(EVIL)}\n")
    attempt = first / "logs" / "attempt_1" / "attempt.json"
    attempt.write_text(json.dumps({**json.loads(attempt.read_text()), "reason": f"lost: {EVIL}", "host": EVIL}))
    folded = shown("runs", "show", str(first))
    assert r"\x1b[2Jgone" in folded and "[red]" in folded
    assert SHOWN in shown("runs", "compare", str(first), str(second)).replace("\n", "")
    assert r"\x1b[2Jgone" in shown("runs", "list", str(tmp_path))


def test_what_is_said_of_data_and_of_mistakes(shown: Shown, tmp_path: Path) -> None:
    """A prompt with its answer; a key, an option, a command and a name that are none."""
    (tmp_path / "data.jsonl").write_text(
        json.dumps({"question": f"1+1? {EVIL}", "answer": f"so: {EVIL} #### 2"}) + "\n"
    )
    assert SHOWN in shown("data", "show", "gsm8k", "--limit", "1", "--path", str(tmp_path / "data.jsonl"))
    for arguments in (
        ("train", EVIL),
        ("runs", "show", EVIL),
        ("methods", EVIL),
        ("convert", "hf-to-megatron", EVIL, EVIL),
        (EVIL,),
        ("runs", "show", f"--{EVIL}"),
    ):
        assert r"\x1b[2J" in shown(*arguments, code=2), arguments


def test_a_bar_that_rich_draws_reads_no_colours_out_of_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megasharp.common.terminal import guard_streams
    from megasharp.metrics.console import Progress, SafeConsole

    guard_streams()
    with Progress(2, 1, console=SafeConsole(force_terminal=True, width=100, _environ={"TERM": "xterm"})) as progress:
        print(f"printed {EVIL}")
        print(f"warned {EVIL}", file=sys.stderr)
        progress.note(f"noted {EVIL}")
    print(f"after {EVIL}")
    out = capsys.readouterr().out
    assert "\x1b[?25l" in out, "rich hides the cursor by its own sequences"
    assert all(f"{words} {SHOWN}" in out for words in ("printed", "warned", "noted", "after"))
    assert not any(raw in out for raw in ("\x1b[2Jgone", "\x9b", "\x7f", "\u202e"))
    assert visible(visible(EVIL)) == visible(EVIL) == SHOWN and visible("a\tb\nc é 中 👍") == "a\tb\nc é 中 👍"
    assert visible("half \ud800 a pair") == r"half \ud800 a pair"
    assert visible("\u200e\u061c\u2028\U000e0041") == r"\u200e\u061c\u2028\U000e0041"
