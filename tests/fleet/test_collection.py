"""Asynchronous collection over real engines: stragglers, responses continued by other weights, an engine's death.

The oracle is transformers in float64, each token under the weights of the version that its span names.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PYTHON, make_model, tensors_of
from torch import Tensor
from transformers import PreTrainedModel
from waiting import HANG_S

from megasharp.common.records import (
    Completion,
    FinishReason,
    GenerateRequest,
    Group,
    Outcome,
    Prompt,
    Response,
    SamplingParams,
    TaskAnswer,
    Verdict,
)
from megasharp.config.rollout import EngineFlag, InFlight, RolloutConfig, SyncConfig
from megasharp.rollout.async_collector import AsyncRollouts
from megasharp.rollout.sglang.client import api
from megasharp.rollout.sglang.client.api import Limits
from megasharp.rollout.sglang.client.fleet import Fleet, FleetOptions, start_fleet
from megasharp.rollout.sglang.client.launch import FleetSettings
from megasharp.rollout.sglang.client.members import WatchSettings
from megasharp.rollout.step_request import Collected, GroupMaker, StepRequest
from megasharp.tasks.judge import DirectJudge
from megasharp.weight_sync.push import FleetSync, make_transport

pytestmark = pytest.mark.long("fleet-sync")

TOLERANCE = 1e-5
# A few of 320 tokens end a response, so lengths differ widely. At 0 and 319 SGLang stops by itself: the model's config
# and the tokenizer that it makes up for a folder without one say so.
ENDS = (0, 71, 211, 319)
SAMPLING = SamplingParams(max_tokens=300, stop_token_ids=ENDS, temperature=1.3)
WANTED = 4
SAMPLES = 3
# An engine is asked for a token to see whether it lives; on a busy machine that may take seconds.
WATCH = WatchSettings(probe_every=2.0, suspect_every=0.5, probe_limit=6.0)


class Weights:
    """A learner that only has weights: version `v` is the first policy with matrices larger by 3% times `v % 4`."""

    def __init__(self, first: PreTrainedModel) -> None:
        self._network = first
        self._first = {name: parameter.detach().clone() for name, parameter in first.named_parameters()}
        self.version = -1

    def at(self, version: int) -> PreTrainedModel:
        """The network with the weights of this version."""
        with torch.no_grad():
            for name, parameter in self._network.named_parameters():
                parameter.copy_(self._first[name] * (1 + 0.03 * (version % 4) * (parameter.ndim > 1)))
        return self._network

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        self.version += 1
        yield from tensors_of(self.at(self.version))


class Prompts:
    """Prompts 0, 1, 2, ... of five tokens."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> list[Prompt]:
        numbers = range(self.taken, self.taken + count)
        self.taken += count
        return [Prompt(f"p{n}", "any", "", (7, 8 + n, 9, 10 + n, 11), TaskAnswer(), "s", 0, n) for n in numbers]


class Run:
    """A fleet with its weights and its collector; keeps what every step gave."""

    def __init__(self, engines: Engines, sync: SyncConfig, **settings: object) -> None:
        fleet, policy, _ = engines
        maker = GroupMaker(DirectJudge({"any": fine}), lambda rows: [""] * len(rows), SAMPLING, SAMPLES, seed=1)
        self.fleet = fleet
        self.weights = Weights(policy)
        self.source = Prompts()
        self.rollouts = AsyncRollouts(fleet, maker, RolloutConfig(**settings))  # type: ignore[arg-type]
        self.seen: list[int] = []
        self._sync = FleetSync(fleet, make_transport(fleet, "shared_memory", sync), fleet.version)
        self.weights.version = fleet.version
        self.push()

    def push(self) -> None:
        self._sync.push(self.weights)

    def step(self, number: int, last: bool = False) -> Collected:
        found = self.rollouts.collect(self.source, StepRequest(number, WANTED, lambda groups: groups, last=last))
        assert len(found.groups) == WANTED
        self.seen += [group.prompt.position for group in found.groups]
        return found

    def check_prompts(self) -> None:
        """None was lost, none came twice."""
        assert len(self.seen) == len(set(self.seen))
        assert sorted([*self.seen, *self.pending()]) == list(range(self.source.taken))

    def pending(self) -> list[int]:
        return [prompt.position for prompt in self.rollouts.unfinished()]

    def in_flight(self) -> int:
        return sum(member.requests for member in self.fleet.members.all)


def fine(text: str, answer: TaskAnswer) -> Verdict:
    return Verdict(Outcome.CORRECT, 1.0, text)


def versions_of(response: Response) -> list[int]:
    """The version of every token; spans cover the response without a gap."""
    spans = response.completion.version_spans
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == response.length
    return [span.version for span in spans for _ in range(span.start, span.end)]


@torch.no_grad()
def worst(weights: Weights, groups: list[Group]) -> float:
    """The largest distance of a token's log-prob from the oracle's under the version that sampled it."""
    distances = [0.0]
    responses = [(group.prompt, response) for group in groups for response in group.responses]
    for version in sorted({v for _, response in responses for v in versions_of(response)}):
        network = copy.deepcopy(weights.at(version)).double()
        for prompt, response in responses:
            mine = torch.tensor([v == version for v in versions_of(response)])
            tokens = response.completion.tokens
            ids = torch.tensor([[*prompt.tokens, *tokens.tolist()]])
            logits_TV = network(ids).logits[0, len(prompt.tokens) - 1 : -1]
            logp_TV = (logits_TV / SAMPLING.temperature).log_softmax(-1)
            off_T = (logp_TV.gather(1, tokens[:, None])[:, 0] - response.completion.policy_logp).abs()
            distances += off_T[mine].tolist()
    return max(distances)


def check_whole(groups: list[Group]) -> None:
    for response in (response for group in groups for response in group.responses):
        ended = response.completion.tokens[-1].item() in ENDS
        assert response.completion.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or response.length == SAMPLING.max_tokens
        assert not set(response.completion.tokens[:-1].tolist()) & set(ENDS)


Engines = tuple[Fleet, PreTrainedModel, list[str]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Three engines for all tests: to start them takes longer than everything else. The last test loses two."""
    folder = tmp_path_factory.mktemp("fleet")
    told: list[str] = []
    policy = make_model(folder / "policy", "policy3", seed=1)
    settings = FleetSettings(
        python=PYTHON,
        model=folder / "policy",
        log_folder=folder / "logs",
        rollout=RolloutConfig(engines=3, restarts=0, sglang={"max_total_tokens": 16384, "max_running_requests": 32}),
        start_limit_s=HANG_S,
    )
    fleet = start_fleet(settings, FleetOptions(watch=WATCH), told.append)
    try:
        yield fleet, policy, told
    finally:
        fleet.close()


def test_on_policy_stragglers_are_aborted_and_come_first_in_the_next_step(
    engines: Engines,
) -> None:
    run = Run(engines, SyncConfig(), oversample=1.0)
    for number in range(1, 4):
        before = run.pending()
        found = run.step(number)
        assert found.metrics["rollout/aborted"] == len(run.pending()) == WANTED
        assert run.in_flight() == 0
        assert {v for g in found.groups for r in g.responses for v in versions_of(r)} == {run.fleet.version}
        assert set(before) <= {*run.seen, *run.pending()}
        check_whole(found.groups)
        assert worst(run.weights, found.groups) < TOLERANCE
        run.push()
    run.check_prompts()


def test_partial_responses_are_continued_by_the_next_weights(engines: Engines) -> None:
    run = Run(engines, SyncConfig(), oversample=1.0, max_staleness=1)
    two = 0
    for number in range(1, 6):
        found = run.step(number)
        present = run.fleet.version
        versions = [versions_of(r) for g in found.groups for r in g.responses]
        assert {v for each in versions for v in each} <= {present - 1, present}
        two += sum(len(set(each)) == 2 for each in versions)
        assert run.in_flight() == 0
        check_whole(found.groups)
        assert worst(run.weights, found.groups) < TOLERANCE
        run.push()
    assert two > 0, "no response was continued"
    run.check_prompts()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_engines_go_on_while_weights_are_pushed(engines: Engines, mode: InFlight) -> None:
    """What is in flight at a push is paused, gets its new tokens from the new weights, and trains in the next step."""
    run = Run(engines, SyncConfig(in_flight=mode), oversample=0.5, max_staleness=1, stragglers="keep")
    two = 0
    for number in range(1, 6):
        found, present = run.step(number, last=number == 5), run.fleet.version
        if number < 5:
            run.push()
        versions = [versions_of(r) for g in found.groups for r in g.responses]
        assert {v for each in versions for v in each} <= {present - 1, present}
        two += sum(len(set(each)) == 2 for each in versions)
        check_whole(found.groups)
        # In place, new tokens are sampled from what the old weights cached: no version's own log-probs.
        assert mode == "in_place" or worst(run.weights, found.groups) < TOLERANCE
    assert two > 0, "nothing was in flight at a push"
    assert run.in_flight() == 0
    run.check_prompts()


def test_prompts_that_come_after_a_push_in_place_are_read_anew(engines: Engines) -> None:
    """The engines still have them cached as the weights before read them."""
    run = Run(engines, SyncConfig(in_flight="in_place"))
    for _ in range(2):
        run.source.taken = 0
        assert worst(run.weights, run.step(1).groups) < TOLERANCE
        run.push()


def test_no_response_is_lost_to_waiting(tmp_path: Path) -> None:
    """384 responses where an engine runs 4 at once: with a limit that counted its queue, most ended without a token."""
    make_model(tmp_path / "policy", "policy3", seed=1)
    flags: dict[str, EngineFlag] = {"max_total_tokens": 16384, "max_running_requests": 4}
    settings = FleetSettings(
        python=PYTHON,
        model=tmp_path / "policy",
        log_folder=tmp_path / "logs",
        rollout=RolloutConfig(engines=1, restarts=0, request_limit_s=0.9, sglang=flags),
        start_limit_s=HANG_S,
    )
    fleet = start_fleet(settings)
    try:
        # Four tokens take far less than the limit, all responses together more.
        requests = [GenerateRequest((7, 8 + n, 9, 10 + n, 11), (0, 1, 2, 3)) for n in range(96)]
        found = fleet.generate(requests, SamplingParams(max_tokens=4))
    finally:
        fleet.close()
    ends = [completion.finish_reason for completions in found for completion in completions]
    assert len(ends) == 384 and FinishReason.ABORT not in ends


def test_a_prompt_over_its_time_limit_is_an_outcome(engines: Engines) -> None:
    """Its responses are masked as infra failures, with the tokens that they have."""
    fleet, _, _ = engines
    router = fleet._router
    limits, router._limits = router._limits, Limits(HANG_S, 0.15)
    try:
        found = Run(engines, SyncConfig()).step(1)
    finally:
        router._limits = limits
    responses = [response for group in found.groups for response in group.responses]
    cut = [response for response in responses if response.verdict.outcome is Outcome.INFRA]
    assert cut and all(r.completion.finish_reason is FinishReason.ABORT for r in cut)
    assert any(response.length for response in cut)


def test_the_samples_of_a_prompt_share_its_cache(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    cached: list[int] = []
    real = api.completions

    def noting(answer: Any, *rest: Any) -> list[Completion]:
        cached.extend(item["meta_info"]["cached_tokens"] for item in answer)
        return real(answer, *rest)

    monkeypatch.setattr(api, "completions", noting)
    Run(engines, SyncConfig())
    found = engines[0].submit(GenerateRequest(tuple(range(10, 210)), (1, 2, 3)), SAMPLING).result(timeout=HANG_S)
    assert len(found) == 3
    assert cached == [199] * 3, "each computes the prompt's last token, whose logits it samples from"


@pytest.mark.parametrize(("number", "deed"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_an_engine_lost_in_the_middle_of_a_step(engines: Engines, number: int, deed: signal.Signals) -> None:
    """Killed, or hung: then its probes give it up. Its prompts go to the others, and no step lacks a group."""
    fleet, _, told = engines
    run = Run(engines, SyncConfig(), oversample=0.5, max_staleness=1)
    victim, retried = fleet.members.all[number], fleet.retried

    def strike() -> None:
        while victim.requests == 0:
            time.sleep(0.1)
        os.killpg(victim.process.pid, deed)  # type: ignore[attr-defined]

    striking = threading.Thread(target=strike, daemon=True)
    striking.start()
    began = time.monotonic()
    for step in range(1, 4):
        found = run.step(step)
        check_whole(found.groups)
        assert worst(run.weights, found.groups) < TOLERANCE
        run.push()
    striking.join()
    assert time.monotonic() - began < HANG_S
    run.check_prompts()
    conditions = [member.health.condition.value for member in fleet.members.all]
    assert conditions == ["dead"] * (number + 1) + ["serving"] * (2 - number)
    reason = "its process was killed by SIGKILL" if deed is signal.SIGKILL else "no answer to /health within 6 s"
    # Whoever meets it first tells: the watch, a request, or the next push.
    assert any(line.startswith(f"engine {number} is lost: dead (") and reason in line for line in told), told
    assert fleet.retried > retried
