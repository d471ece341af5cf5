"""Evaluation of an engine that answers by a rule of its seeds, so that every count is known."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import replace

import pytest

from megasharp.algos.base import MemoryNeed
from megasharp.algos.dlc import MemoryParams
from megasharp.common.errors import UserError
from megasharp.common.records import Completion, FinishReason, Outcome, SamplingParams, Verdict
from megasharp.evals.estimators import pass_at_k
from megasharp.evals.evaluate import CANDIDATES, sample_seed
from megasharp.evals.judging import Judging
from megasharp.evals.result_files import load_result, save, stored_figures
from megasharp.evals.suites import Suite
from megasharp.tasks.judge import DirectJudge
from megasharp.tasks.table import make_verifiers
from tests.unit.evals.rule_engine import TEXTS, RuleEngine, run, suite_of


def texts_of(problem: str, n: int, seed: int) -> list[str]:
    return [TEXTS[sample_seed(seed, problem, index) % 5] for index in range(n)]


def test_every_figure_follows_from_the_samples():
    result = run(label="before", step=0)
    samples = {f"p{index}": texts_of(f"p{index}", 10, 3) for index in range(6)}
    correct = [sum(text in ("1+2", "2+1") for text in texts) for texts in samples.values()]
    everything = [text for texts in samples.values() for text in texts]
    assert 0 < sum(correct) < 60
    assert [row.id for row in result.rows] == list(samples)
    assert [row.correct for row in result.rows] == correct
    assert sum(row.format for row in result.rows) == everything.count("1+")
    assert sum(row.wrong for row in result.rows) == everything.count("2*1") + everything.count("1-2")
    assert [row.distinct_correct for row in result.rows] == [int(count > 0) for count in correct]
    assert result.pass_at_k == pytest.approx(
        {k: sum(pass_at_k(10, count, k) for count in correct) / 6 for k in (1, 4, 10)}
    )
    assert result.avg_at_n == pytest.approx(sum(correct) / 60)
    assert result.pass_at_n == sum(count > 0 for count in correct) / 6
    assert result.greedy_accuracy == 1.0
    assert result.tokens == sum(len(text) + 1 for text in everything)
    assert result.mean_length == pytest.approx(result.tokens / 60)
    assert result.truncated == pytest.approx(everything.count("1+") / 60)
    assert (result.problems, result.left_out, result.infra) == (6, 0, 0)
    assert (result.label, result.step, result.seed) == ("before", 0, 3)
    assert result.figures()["eval/tiny/pass@4"] == result.pass_at_k[4]
    assert result.figures()["eval/tiny/greedy"] == 1.0


def test_requests_are_a_few_samples_of_one_problem_and_their_size_changes_nothing():
    """As many samples as have about 16,384 tokens, at most 8; all of a problem where a reward compares them."""
    found = {}
    for max_tokens, together in ((8, False), (4096, False), (8192, False), (1 << 20, False), (8, True)):
        engine = RuleEngine()
        found[max_tokens, together] = run(engine, max_tokens=max_tokens, together=together)
        requests = [request for some, _ in engine.calls for request in some]
        assert len({(request.tokens, seed) for request in requests for seed in request.seeds}) == 60
        sizes = {len(request.seeds) for request in requests[6:]}
        assert sizes == {8: {8, 2}, 4096: {4, 2}, 8192: {2}, 1 << 20: {1}}[max_tokens] if not together else {10}
    assert all(result.rows == run().rows for result in found.values())


def test_greedy_responses_are_judged_by_themselves(monkeypatch):
    """Also where they wait for the judge beside drawn ones: a reward that compares would see a group of n + 1."""
    sampled, put, calls = threading.Event(), Judging.put, []

    def noticed(judging, finished):
        put(judging, finished)
        if not finished.greedy and finished.number == 5:
            sampled.set()

    class Slow(DirectJudge):
        def verdicts(self, items):
            assert sampled.wait(60)
            calls.append(Counter(item.prompt for item in items))
            return super().verdicts(items)

    monkeypatch.setattr(Judging, "put", noticed)
    run(together=True, judge=Slow(make_verifiers(["countdown"])))
    assert {size for call in calls for size in call.values()} == {1, 10}


def test_seeds_depend_on_run_problem_and_sample_only():
    by_order = run(suite=Suite("tiny", "countdown", suite_of(6).items[::-1])).rows[::-1]
    assert by_order == run().rows
    assert run(n=20).rows != run().rows
    assert [row.correct for row in run(seed=4).rows] != [row.correct for row in run().rows]
    seeds = {sample_seed(s, p, i) for s in (1, 2) for p in ("a", "b", "1", "11") for i in range(500)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, "countdown-dev-00000", 0) == 1206320961467803085


def test_sampling_parameters_reach_the_engine():
    engine = RuleEngine()
    run(engine, temperature=0.7, top_p=0.9, max_tokens=5)
    assert list(dict.fromkeys(call[1] for call in engine.calls)) == [
        SamplingParams(max_tokens=5, temperature=0.0, stop_token_ids=(0,)),
        SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, stop_token_ids=(0,), record_top=CANDIDATES),
    ]
    assert engine.calls[2][0][0].tokens == tuple(map(ord, "2:"))
    without = RuleEngine()
    assert run(without, greedy=False).greedy_accuracy is None
    assert all(sampling.temperature for _, sampling in without.calls)


def test_a_memory_network_takes_part():
    engine = RuleEngine()
    run(engine, memory=MemoryNeed(MemoryParams(path="folder"), 0.3, 0.05))
    assert {(s.memory_mu, s.plausible) for _, s in engine.calls} == {(0.3, 0.05)}
    plain = RuleEngine()
    assert "eval/tiny/distinct_correct" in run(plain).figures()
    assert {s.memory_mu for _, s in plain.calls} == {None}


def test_infra_failures_are_not_samples():
    def verify(text: str, answer: object) -> Verdict:
        infra = text == "1-2"
        return Verdict(Outcome.INFRA if infra else Outcome.CORRECT if text == "1+2" else Outcome.WRONG, 0.0)

    result = run(judge=DirectJudge({"countdown": verify}), ks=[1, 8])
    samples = [texts_of(f"p{index}", 10, 3) for index in range(6)]
    judged = [10 - texts.count("1-2") for texts in samples]
    kept = [texts for texts, count in zip(samples, judged, strict=True) if count >= 8]
    assert 0 < len(kept) < 6
    assert [row.samples for row in result.rows] == judged
    assert (result.problems, result.left_out) == (len(kept), 6 - len(kept))
    assert result.infra == 60 - sum(judged)
    shares = [texts.count("1+2") / (10 - texts.count("1-2")) for texts in kept]
    assert result.pass_at_k[1] == pytest.approx(sum(shares) / len(kept))


def test_an_aborted_response_is_an_infra_failure():
    class AbortingEngine(RuleEngine):
        def complete(self, seed: int, sampling: SamplingParams) -> Completion:
            whole = super().complete(seed, sampling)
            aborted = TEXTS[seed % 5] == "2*1" and sampling.temperature > 0
            return replace(whole, finish_reason=FinishReason.ABORT) if aborted else whole

    result = run(AbortingEngine(), ks=[1])
    assert result.infra == sum(texts_of(f"p{index}", 10, 3).count("2*1") for index in range(6))


def test_figures_that_are_not_finite_have_no_part_in_means():
    """As of a server that reports -inf: every other figure stands, with an interval."""

    class Impossible(RuleEngine):
        def generate(self, *asked):
            for group in super().generate(*asked):
                yield [replace(one, sampler_logp=one.sampler_logp * float("inf")) for one in group]

    result, plain = run(Impossible()), run()
    assert result.pass_at_k == plain.pass_at_k and result.intervals["pass@4"] == plain.intervals["pass@4"]
    assert result.token_entropy_sampled is None and plain.token_entropy_sampled is not None


def test_nothing_left_to_score_is_one_line():
    with pytest.raises(UserError, match="infra failures left no problem with 10 samples"):
        run(judge=DirectJudge({"countdown": lambda text, answer: Verdict(Outcome.INFRA, 0.0)}))


def test_a_verifier_that_raises_is_an_error_outcome():
    def verify(text: str, answer: object) -> Verdict:
        if text == "1+":
            raise RecursionError("too deep")
        return Verdict(Outcome.WRONG, 0.0)

    result = run(judge=DirectJudge({"countdown": verify}))
    assert sum(row.error for row in result.rows) == sum(texts_of(f"p{i}", 10, 3).count("1+") for i in range(6))
    assert result.pass_at_n == 0.0


def test_bad_requests_are_refused_before_sampling():
    engine = RuleEngine()
    with pytest.raises(UserError, match="10 samples per problem cannot give pass@11"):
        run(engine, ks=[1, 11])
    with pytest.raises(UserError, match="task 'countdown' has no verifier; tasks with one: maths"):
        run(engine, judge=DirectJudge({"maths": lambda text, answer: Verdict(Outcome.WRONG, 0.0)}))
    assert engine.calls == []


def test_saved_files_hold_the_result(tmp_path):
    import pandas as pd

    result = run(label="after", step=150)
    path = save(result, tmp_path / "evals" / "step_000150")
    assert stored_figures(path) == result.figures()
    assert load_result(path) == result
    assert sorted(file.name for file in path.parent.iterdir()) == ["tiny.json", "tiny.parquet"]
    figures = json.loads(path.read_text())
    assert figures["pass_at_k"] == {str(k): value for k, value in result.pass_at_k.items()}
    assert (figures["label"], figures["step"], figures["greedy_accuracy"]) == ("after", 150, 1.0)
    assert "rows" not in figures
    table = pd.read_parquet(path.with_suffix(".parquet"))
    assert table["correct"].tolist() == [row.correct for row in result.rows]
    assert table["greedy_correct"].tolist() == [True] * 6
    assert save(run(greedy=False), tmp_path).exists()
