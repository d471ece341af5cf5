"""An evaluation that goes on where it was cut off, bit for bit; and files of other evaluations."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import wait_until

from megasharp.common.errors import UserError
from megasharp.common.records import Completion, GenerateRequest, SamplingParams, Verdict
from megasharp.common.signals import SaveAsked
from megasharp.evals.result_files import load_figures, load_result, save
from megasharp.evals.stored_samples import journals, read_samples
from megasharp.tasks.judge import DirectJudge, Item
from megasharp.tasks.table import make_verifiers
from tests.unit.evals.rule_engine import RuleEngine, run, store_of


class Cut(Exception):
    """What a kill is to the process."""


class CutEngine(RuleEngine):
    """Answers so many calls, then is cut off."""

    def __init__(self, calls: int, error: BaseException | None = None) -> None:
        super().__init__()
        self.left, self.error = calls, error or Cut()

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        if not self.left:
            raise self.error
        self.left -= 1
        return super().generate(requests, sampling)


def sampled(*engines: RuleEngine) -> int:
    """Samples drawn."""
    return sum(len(one.seeds) for engine in engines for requests, _ in engine.calls for one in requests)


@pytest.mark.parametrize("calls", [0, 1, 4, 9])
@pytest.mark.parametrize("error", [Cut, SaveAsked])
def test_an_evaluation_goes_on_where_it_was_cut_off(tmp_path: Path, calls: int, error: type[BaseException]) -> None:
    """All that was sampled is kept, and drawn once; a third start draws nothing."""
    whole = run()
    first, second, third = CutEngine(calls, error()), RuleEngine(), RuleEngine()
    with pytest.raises(error):
        run(first, store=store_of(tmp_path))
    assert len(list(read_samples(tmp_path, "tiny"))) == sampled(first) > 0 or calls == 0
    store = store_of(tmp_path)
    result = run(second, store=store)
    assert replace(result, seconds=0.0) == replace(whole, seconds=0.0)
    assert sampled(first, second) == 66
    again = run(third, store=store_of(tmp_path))
    assert third.calls == [] and replace(again, seconds=0.0) == replace(whole, seconds=0.0)
    store.finish()
    assert len(list(read_samples(tmp_path, "tiny"))) == 66


def test_a_journal_that_a_kill_cut_anywhere_gives_the_same_figures(tmp_path: Path) -> None:
    """And takes another k, another way to keep and another order of what is missing."""
    whole = run()
    run(store=store_of(tmp_path / "whole"))
    (journal,) = journals(tmp_path / "whole", "tiny")
    content = journal.read_bytes()
    for cut in random.Random(2).sample(range(len(content)), 6):
        at = tmp_path / str(cut) / "samples"
        at.mkdir(parents=True)
        (at / journal.name).write_bytes(content[:cut])
        result = run(store=store_of(at.parent, "answers"), ks=(2,))
        assert result.rows == whole.rows and set(result.pass_at_k) == {2}


def test_sampling_goes_on_while_responses_are_judged() -> None:
    """The first verdict waits for the last request: with judging on the way of sampling it would wait for ever."""
    engine = RuleEngine()

    class Patient:
        tasks = ("countdown",)

        def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
            wait_until(lambda: sampled(engine) == 66)
            return DirectJudge(make_verifiers()).verdicts(items)

    assert run(engine, judge=Patient()).rows == run().rows


def test_an_error_in_judging_ends_sampling(tmp_path: Path) -> None:
    class Broken:
        tasks = ("countdown",)

        def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
            raise UserError("the sandbox is gone")

    with pytest.raises(UserError, match="the sandbox is gone"):
        run(judge=Broken(), store=store_of(tmp_path))


def test_an_older_release_s_progress_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tiny.samples").mkdir()
    with pytest.raises(UserError, match=r"tiny\.samples: samples in the format of an earlier release, .* remove the f"):
        store_of(tmp_path)


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
