"""A run on a user's own rows: what it says of them, what judges them, and held-out rows as a suite."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chat_models import write_model

from megasharp.common.errors import UserError
from megasharp.config.run_config import load_run
from megasharp.tasks import problems
from megasharp.trainer.resolve import resolved_run
from megasharp.trainer.resolve.resolved_run import ResolvedRun, check
from megasharp.trainer.resolve.summary import describe
from megasharp.trainer.resume import inputs_of

RUN = """
name: mine
steps: 1
model: {path: qwen}
data: {path: rows.jsonl, prompt_key: question, answer_key: answer, max_prompt_tokens: 64, max_response_tokens: 8}
reward: {function: "operator:eq"}
"""
Resolve = Callable[..., ResolvedRun]


@pytest.fixture
def resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Checks the run above, with overrides, in a folder with its rows."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "qwen", "qwen")
    rows = [{"question": "x" * count, "answer": count} for count in (1, 3, 41, 41)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("run.yaml").write_text(RUN)
    return lambda *overrides: check(load_run(Path("run.yaml"), list(overrides)), "run.yaml")


def said(resolved: ResolvedRun, word: str = "data") -> str:
    return next(line for line in describe(resolved).splitlines() if line.startswith(word)).removeprefix(word).strip()


def test_what_is_left_out_by_its_length_is_told(resolve: Resolve) -> None:
    """Of a template's 57 tokens and questions of 1, 3, 41 and 41."""
    assert said(resolve()) == (
        "2 of 4 prompts of rows.jsonl; 2 are longer than 64 tokens (median 79, longest 98): data.max_prompt_tokens; "
        "no evaluation"
    )
    assert said(resolve("data.max_prompt_tokens=98")) == "4 prompts of rows.jsonl; no evaluation"


def test_prompts_that_no_limit_lets_in_are_said_to_be_the_models_matter(
    resolve: Resolve, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model has 1,024 positions; transformers' own line about that stays out of the terminal."""
    Path("rows.jsonl").write_text(json.dumps({"question": "x" * 1000, "answer": 1}) + "\n")
    with pytest.raises(
        UserError, match=r"the shortest has 1057, and the model has 1024 positions in all; shorten them"
    ):
        resolve()
    assert "Token indices" not in capsys.readouterr().err


def test_nothing_that_judges_is_refused(resolve: Resolve) -> None:
    with pytest.raises(
        UserError, match=r"run\.yaml: nothing judges the responses to rows of your own: set reward.func"
    ):
        resolve("reward.function=null")


def test_a_resumed_run_reads_the_commit_that_its_checkpoints_record(
    resolve: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, read = "1" * 40, []

    def rows(path: Path, split: str | None, config: str | None, revision: str | None) -> Iterator[tuple[str, object]]:
        read.append(revision)
        yield "owner/rows, row 0", {"question": "x", "answer": "1"}

    monkeypatch.setattr(problems, "own_rows", rows)
    monkeypatch.setattr(resolved_run, "commit_read", lambda hub, revision: revision or began)
    first = inputs_of(resolve("data.path=owner/rows"))
    config = load_run(Path("run.yaml"), ["data.path=owner/rows"])
    assert first.commits == {"data.path": began}
    assert inputs_of(check(config, "run.yaml", begun=True, commits=first.commits)) == first
    assert read == [None, began]
