"""An evaluation that goes on where it was cut off, bit for bit; and files of other evaluations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megasharp.common.errors import UserError
from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.evals.evaluate import Progress
from megasharp.evals.result_files import load_figures, load_result, save
from tests.unit.evals.rule_engine import RuleEngine, run

IDENTITY = {"weights": "abc", "n": "10", "temperature": "1.0"}


class Cut(Exception):
    """What a kill is to the process."""


class CutEngine(RuleEngine):
    """Answers so many calls, then is cut off."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        if not self.left:
            raise Cut
        self.left -= 1
        return super().generate(requests, sampling)


@pytest.mark.parametrize("calls", [0, 1, 4, 9])
def test_an_evaluation_goes_on_where_it_was_cut_off(tmp_path: Path, calls: int) -> None:
    whole_engine = RuleEngine()
    whole = run(whole_engine, chunk_samples=7)
    with pytest.raises(Cut):
        run(CutEngine(calls), chunk_samples=7, progress=Progress(tmp_path / "p", IDENTITY))
    engine = RuleEngine()
    progress = Progress(tmp_path / "p", IDENTITY)
    assert (progress.samples > 0) == (calls > 0)
    result = run(engine, chunk_samples=7, progress=progress)
    assert replace(result, seconds=0.0) == replace(whole, seconds=0.0)
    assert len(engine.calls) == len(whole_engine.calls) - calls
    again = RuleEngine()
    third = run(again, chunk_samples=7, progress=progress)
    assert again.calls == [] and third == result
    progress.remove()
    assert not (tmp_path / "p").exists()


def test_samples_of_another_evaluation_are_refused_in_one_line(tmp_path: Path) -> None:
    Progress(tmp_path, IDENTITY).write("samples_000000", [], 1.0)
    with pytest.raises(UserError, match=r"holds samples of another evaluation \(n 10, now 20\); give another --out"):
        Progress(tmp_path, IDENTITY | {"n": "20"})
    (tmp_path / "identity.json").write_text("{")
    with pytest.raises(UserError, match=r"identity\.json: cannot be read"):
        Progress(tmp_path, IDENTITY)


def test_a_chunk_that_is_none_is_named(tmp_path: Path) -> None:
    progress = Progress(tmp_path, IDENTITY)
    (tmp_path / "samples_000000.parquet").write_bytes(b"no table")
    with pytest.raises(UserError, match=r"samples_000000\.parquet: cannot be read .* remove it to sample it again"):
        progress.read("samples_000000")


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    """Their JSON has none of the later figures, their table none of the later columns."""
    import pandas as pd

    result = run(label="old", step=3)
    path = save(result, tmp_path)
    tree = json.loads(path.read_text())
    later = ("maj_at_k", "answer_entropy", "token_entropy", "token_entropy_sampled", "lambdas", "lambda_sample")
    for name in (*later, "multiplicity", "solutions_found", "top_p", "max_tokens", "intervals", "identity"):
        del tree[name]
    path.write_text(json.dumps(tree))
    table = path.with_suffix(".parquet")
    pd.read_parquet(table).iloc[:, :11].assign(greedy_correct=True).to_parquet(table)
    found = load_result(path)
    assert found.pass_at_k == result.pass_at_k and found.maj_at_k == {} and found.top_p == 1.0
    assert [row.correct for row in found.rows] == [row.correct for row in result.rows]
    assert found.rows[0].answers is None


def test_a_table_of_another_evaluation_is_told(tmp_path: Path) -> None:
    import pandas as pd

    path = save(run(), tmp_path)
    table = path.with_suffix(".parquet")
    whole = pd.read_parquet(table)
    fewer_samples = whole.assign(samples=whole["samples"] - 1)
    for other in (whole.iloc[:-1], fewer_samples):
        other.to_parquet(table)
        with pytest.raises(UserError, match=r"tiny\.parquet: \d problems that are not the 6 of 10 samples each"):
            load_result(path)
    whole.to_parquet(table)
    assert len(load_result(path).rows) == len(whole)


def test_what_is_no_evaluation_is_one_line(tmp_path: Path) -> None:
    path = save(run(), tmp_path)
    with pytest.raises(UserError, match="cannot read this evaluation"):
        load_figures(tmp_path / "nothing.json")
    path.with_suffix(".parquet").unlink()
    with pytest.raises(UserError, match=r"tiny\.parquet: not the table of an evaluation beside tiny\.json"):
        load_result(path)
    for text in ("{", "[]", '{"suite": 3}'):
        path.write_text(text)
        with pytest.raises(UserError, match="not the JSON file of an evaluation"):
            load_figures(path)
