"""Engines in the ranks' processes: one engine's completions, whoever samples what, and the ranks' ends as in a step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from policies import CPU, LAYOUTS, recipe, save_model, settings

from megasharp.common import signals
from megasharp.common.errors import RankDied, UserError
from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.learner.learner import MEMORY, POLICY
from megasharp.learner.ranks.all_ranks import RanksLearner
from megasharp.learner.ranks.processes import ProcessRanks
from megasharp.rollout.inprocess import InProcessEngine
from megasharp.rollout.streaming import Ended
from megasharp.trainer import rank_engines
from megasharp.trainer.rank_engines import EngineFolders, RankEngines
from megasharp.weight_sync.endpoints import InPlaceSync, InProcessSync

# Unequal prompts, numbers of responses, and limits; one rank more than the shortest batch has requests for.
REQUESTS = [
    GenerateRequest((1, 2, 3), tuple(range(100, 106))),
    GenerateRequest((4, 5), (7,)),
    GenerateRequest(tuple(range(10, 22)), (8, 9, 10), max_tokens=5),
    GenerateRequest((4, 5), (11, 12)),
    GenerateRequest((50,), (13,)),
]
SAMPLING = SamplingParams(12, temperature=0.8, top_p=0.9, stop_token_ids=(3, 17), record_top=2)
CALIBRATED = SamplingParams(9, stop_token_ids=(3,), memory_mu=0.4)


@pytest.fixture
def folders(tmp_path: Path) -> EngineFolders:
    policy, memory = (tmp_path / name for name in ("policy", "memory"))
    policy.mkdir()
    memory.mkdir()
    return EngineFolders(
        Path(save_model(policy, "qwen3-tied")), Path(save_model(memory, "qwen2-tied")), memory_window=4
    )


@pytest.fixture
def ranks(folders: EngineFolders, tmp_path: Path) -> Iterator[ProcessRanks]:
    named = {POLICY: folders.policy, MEMORY: folders.memory}
    needs = recipe().needs
    started = ProcessRanks(
        {name: settings(str(folder), LAYOUTS["dp2"], needs) for name, folder in named.items()}, CPU, tmp_path / "logs"
    )
    yield started
    started.close()


def engines_in(ranks: ProcessRanks, folders: EngineFolders) -> RankEngines:
    engines = RankEngines(RanksLearner(ranks), RanksLearner(ranks, MEMORY), 2, folders)
    sync = InPlaceSync(engines, version=4)
    assert sync.push(RanksLearner(ranks), RanksLearner(ranks, MEMORY)) == engines.version == 5
    return engines


def same(found: Completion, expected: Completion) -> None:
    for name in ("tokens", "sampler_logp", "policy_logp", "memory_logp", "calibration_kl", "entropy", "top_logp"):
        ours, one = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (one is None), name
        if one is not None:
            torch.testing.assert_close(ours, one, atol=2e-5, rtol=1e-5, msg=name)
    assert found.version_spans == expected.version_spans and found.finish_reason is expected.finish_reason
    assert found.seed == expected.seed


def test_two_ranks_sample_what_one_engine_samples(ranks: ProcessRanks, folders: EngineFolders) -> None:
    """No other test has a share's completions come back in another order than they were asked for."""
    engines = engines_in(ranks, folders)
    one = InProcessEngine(
        folders.policy, dtype=torch.float32, device=CPU, memory_folder=folders.memory, memory_window=4
    )
    InProcessSync(one, version=4).push(RanksLearner(ranks), RanksLearner(ranks, MEMORY))
    for requests, sampling in ((REQUESTS, SAMPLING), (REQUESTS, CALIBRATED), (REQUESTS[:1], SAMPLING)):
        found, expected = engines.generate(requests, sampling), one.generate(requests, sampling)
        assert [len(each) for each in found] == [len(request.seeds) for request in requests]
        for ours, theirs in zip(found, expected, strict=True):
            for completion, other in zip(ours, theirs, strict=True):
                same(completion, other)
    assert [len(each) for each in in_a_stream(engines)] == [6, 6, 1, 3, 2, 1, 2]
    scored, its = (each.candidates((1, 2), (9, 3, 30), 4) for each in (engines, one))
    assert torch.equal(scored.tokens_TN, its.tokens_TN)
    torch.testing.assert_close(scored.logp_T, its.logp_T)


def test_ranks_that_hold_a_part_of_the_experts_each_sample_with_all(tmp_path: Path) -> None:
    folder = Path(save_model(tmp_path, "qwen3moe-tied"))
    folders, layout = EngineFolders(folder, records_experts=True), LAYOUTS["ep2"]
    ranks = ProcessRanks({POLICY: settings(str(folder), layout, recipe().needs)}, CPU, tmp_path / "logs")
    try:
        engines = RankEngines(RanksLearner(ranks), None, 2, folders)
        InPlaceSync(engines, version=4).push(RanksLearner(ranks), None)
        one = InProcessEngine(folder, dtype=torch.float32, device=CPU, records_experts=True)
        InProcessSync(one, version=4).push(RanksLearner(ranks), None)
        sampled = zip(engines.generate(REQUESTS, SAMPLING), one.generate(REQUESTS, SAMPLING), strict=True)
        for request, (ours, theirs) in zip(REQUESTS, sampled, strict=True):
            for completion, other in zip(ours, theirs, strict=True):
                same(completion, other)
                assert completion.experts is not None and other.experts is not None
                assert completion.experts.shape == (len(request.tokens) + completion.length - 1, 4, 3)
                assert torch.equal(completion.experts.sort().values, other.experts.sort().values)
    finally:
        ranks.close()


def test_what_an_engine_refuses_reads_the_same(ranks: ProcessRanks, folders: EngineFolders) -> None:
    engines = engines_in(ranks, folders)
    with pytest.raises(UserError, match=r"^a prompt holds token ids 1\.\.60, but the model's vocabulary has 53"):
        engines.generate([*REQUESTS, GenerateRequest((1, 60), (1,))], SAMPLING)


def test_a_rank_that_is_killed_while_it_samples_is_named(ranks: ProcessRanks, folders: EngineFolders) -> None:
    engines = engines_in(ranks, folders)
    pid = ranks._processes[1].pid or 0
    killer = threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(RankDied, match=r"rank 1 ended with exit code -9 in sample.*rank_1\.log"):
        while True:
            engines.generate(REQUESTS, SAMPLING)
    killer.join()


def test_no_rank_waits_for_a_long_response_of_another(
    ranks: ProcessRanks, folders: EngineFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of one token: all that is asked later goes to the other rank, and ends before the one long response."""
    engines = engines_in(ranks, folders)
    monkeypatch.setattr(rank_engines, "_CALL_S", 0.0)
    long = SamplingParams(40)
    asked = [(GenerateRequest((9, 8), tuple(range(8))), long)]
    asked += [(GenerateRequest((n, 2), (n,), max_tokens=1 + n % 3), long) for n in range(1, 14)]
    with engines.stream(asked, 10) as ended:
        found = list(ended)
    assert sorted(place for place, _ in found) == list(range(14)) and found[-1][0] == 0
    for place, completions in found:
        for ours, theirs in zip(completions, engines.generate(asked[place][:1], long)[0], strict=True):
            same(ours, theirs)


def test_a_request_to_save_waits_for_an_answer_and_for_no_round(
    ranks: ProcessRanks, folders: EngineFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that nobody waits for would be taken for the next call's."""
    engines = engines_in(ranks, folders)
    before = engines.generate(REQUESTS, SAMPLING)
    monkeypatch.setattr(rank_engines, "_CALL_S", 0.0)
    advance = rank_engines._Flight.advance
    calls: list[object] = []

    def advanced(flight: rank_engines._Flight) -> list[Ended]:
        calls.append(flight)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return advance(flight)

    for sampled in (lambda: engines.generate(REQUESTS, SAMPLING), lambda: in_a_stream(engines)):
        monkeypatch.setattr(signals._State, "save", None)
        monkeypatch.setattr(rank_engines._Flight, "advance", advanced)
        calls.clear()
        with signals.save_heard(), stopped_for(0.2, ranks._processes[1].pid or 0) as is_stopped:
            with pytest.raises(signals.SaveAsked), signals.interruptible():
                sampled()
            assert not is_stopped() and len(calls) <= 3
        monkeypatch.setattr(rank_engines._Flight, "advance", advance)
        for ours, theirs in zip(in_a_stream(engines)[1:6], before, strict=True):
            for completion, other in zip(ours, theirs, strict=True):
                same(completion, other)


def in_a_stream(engines: RankEngines) -> list[list[Completion]]:
    """One request, all, and one with another sampling, by their places."""
    asked = [(request, SAMPLING) for request in (REQUESTS[0], *REQUESTS)]
    with engines.stream([*asked, (REQUESTS[3], CALIBRATED)], 64) as ended:
        done = dict(ended)
    return [done[place] for place in range(len(done))]


@contextlib.contextmanager
def stopped_for(seconds: float, pid: int) -> Iterator[Callable[[], bool]]:
    """A process that goes on after so many seconds; yields whether it does not yet."""
    os.kill(pid, signal.SIGSTOP)
    go_on = threading.Timer(seconds, lambda: os.kill(pid, signal.SIGCONT))
    go_on.start()
    yield go_on.is_alive
    go_on.join()
