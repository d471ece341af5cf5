"""Responses of several turns: what is recorded of each token, limits, failures, and going on after an interruption."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.common.records import Completion, FinishReason, GenerateRequest, Outcome, SamplingParams, Turn
from megasharp.config.rollout import EpisodesConfig
from megasharp.rollout.episodes.episode_engine import RoundEpisodes
from megasharp.rollout.in_flight import join
from megasharp.rollout.inprocess import InProcessEngine
from tests.unit.rollout.conftest import MakeModel, engine_of
from tests.unit.rollout.episodes.games import END, RELEASED, Crowd, Forgets, Game, Hurries, Letters, Regrets
from tests.unit.rollout.test_recorded_experts import assert_routed

LETTERS = Letters()
PROMPT = LETTERS.encode("ab")
SAMPLING = SamplingParams(max_tokens=40, stop_token_ids=(END, 7, 11), record_top=2)
REQUEST = GenerateRequest(PROMPT, tuple(range(12)), episode=Game("echo"))


@pytest.fixture
def served(make_model: MakeModel) -> InProcessEngine:
    return engine_of(*make_model(max_position_embeddings=64))


@pytest.fixture
def engine(served: InProcessEngine) -> Iterator[RoundEpisodes]:
    episodes = RoundEpisodes(served, LETTERS, EpisodesConfig())
    yield episodes
    episodes.close()


def played(engine: RoundEpisodes, request: GenerateRequest, sampling: SamplingParams = SAMPLING) -> list[Completion]:
    (completions,) = engine.generate([request], sampling)
    return completions


def turns_of(completion: Completion) -> tuple[Turn, ...]:
    assert completion.episode is not None
    return completion.episode.turns


def test_an_answer_follows_each_turn_and_the_policy_reads_it(engine: RoundEpisodes, served: InProcessEngine) -> None:
    completions = played(engine, REQUEST)
    finished = [one for one in completions if one.finish_reason is FinishReason.STOP]
    assert len(finished) > 4
    for one in finished:
        tokens, turns = one.tokens.tolist(), turns_of(one)
        assert len(turns) == 3 and turns[-1].until == turns[-1].end == len(tokens)
        actions = [LETTERS.decode(tokens[turn.start : turn.end]) for turn in turns]
        for turn, action, following in zip(turns, actions, turns[1:], strict=False):
            assert tokens[turn.end - 1] in SAMPLING.stop_token_ids
            assert LETTERS.decode(tokens[turn.end : turn.until]) == f"q{action[:2]}"
            assert following.start == turn.until and turn.reward == len(action) / 8
        verdict = one.episode.verdict if one.episode else None
        assert verdict is not None and verdict.canonical_answer == "/".join(actions)
        assert verdict.reward == sum(len(action) for action in actions) / 8
        assert (verdict.outcome is Outcome.CORRECT) == (len(actions[-1]) % 2 == 0)
        # Every token of the policy was drawn after all that stands before it, the environment's tokens among it.
        scored = served.candidates(PROMPT, tokens, 2)
        sampled_T = one.sampled_T
        assert sampled_T is not None and one.entropy is not None and one.top_logp is not None
        torch.testing.assert_close(one.policy_logp[sampled_T], scored.logp_T[sampled_T], atol=2e-5, rtol=0)
        torch.testing.assert_close(one.sampler_logp[sampled_T], scored.logp_T[sampled_T], atol=2e-5, rtol=0)
        torch.testing.assert_close(one.entropy[sampled_T], scored.entropy_T[sampled_T], atol=2e-5, rtol=0)
        torch.testing.assert_close(one.top_logp[sampled_T], scored.topn_logp_TN[sampled_T], atol=2e-5, rtol=0)
        assert not one.policy_logp[~sampled_T].any() and not one.entropy[~sampled_T].any()
        spans = [place for span in one.version_spans for place in range(span.start, span.end)]
        assert spans == sampled_T.nonzero().squeeze(1).tolist()


def test_a_seed_fixes_an_episode_whatever_else_is_in_the_batch(engine: RoundEpisodes) -> None:
    plain = GenerateRequest((5, 6, 7), (1, 2))
    together = engine.generate([plain, REQUEST, replace(REQUEST, seeds=(3, 99))], SAMPLING)
    alone = [played(engine, replace(REQUEST, seeds=(seed,)))[0] for seed in REQUEST.seeds]
    assert [one.tokens.tolist() for one in together[1]] == [one.tokens.tolist() for one in alone]
    assert together[2][0].tokens.tolist() == together[1][3].tokens.tolist()
    assert [one.tokens.tolist() for one in together[0]] == [one.tokens.tolist() for one in played(engine, plain)]


def test_answers_have_experts_too_and_an_interrupted_episode_keeps_what_it_had(make_model: MakeModel) -> None:
    """At every position, against a full forward of all turns: over every part of a response that goes on."""
    model, folder = make_model("qwen3_moe", max_position_embeddings=64)
    engine = RoundEpisodes(engine_of(model, folder, records_experts=True), LETTERS, EpisodesConfig())
    completions = played(engine, replace(REQUEST, seeds=REQUEST.seeds[:8]))
    assert sum(len(turns_of(one)) for one in completions) > 8
    for whole in completions:
        assert_routed(model, PROMPT, whole)
        assert whole.experts is not None
        turns = turns_of(whole)
        for turn in [turn for turn in turns if turn.until < len(whole.tokens)]:
            for place in {turn.end, turn.until}:
                over = tuple(each for each in turns if each.end < each.until <= place)
                begun = tuple(whole.tokens[:place].tolist())
                request = GenerateRequest(PROMPT, (whole.seed,), (begun,), episode=Game("echo"), begun_turns=(over,))
                (rest,) = played(engine, request)
                read = whole.experts[: len(PROMPT) + turn.end - 1] + 100
                earlier = replace(whole, tokens=whole.tokens[:place], experts=read, episode=None, **_cut(whole, place))
                both = join(earlier, rest).experts
                assert both is not None and torch.equal(both[: len(read)], read)
                assert torch.equal(both[len(read) :], whole.experts[len(read) :])
    engine.close()


@each_case("limits", [EpisodesConfig(), EpisodesConfig(turn_tokens=3)])
def test_an_interrupted_episode_goes_on_as_if_it_had_not_been(served: InProcessEngine, limits: EpisodesConfig) -> None:
    engine = RoundEpisodes(served, LETTERS, limits)
    for whole in played(engine, REQUEST):
        turns = turns_of(whole)
        # After each token of the policy, the last of a turn among them, and after each answer.
        places = [place for turn in turns for place in (turn.start + 1, turn.end - 1, turn.end, turn.until)]
        for place in {each for each in places if 0 < each < len(whole.tokens)}:
            over = tuple(turn for turn in turns if turn.end < turn.until <= place)
            begun = tuple(whole.tokens[:place].tolist())
            request = GenerateRequest(PROMPT, (whole.seed,), (begun,), episode=Game("echo"), begun_turns=(over,))
            (rest,) = played(engine, request)
            assert rest.tokens.tolist() == whole.tokens[place:].tolist()
            assert rest.episode == whole.episode and rest.finish_reason is whole.finish_reason
            earlier = replace(whole, tokens=whole.tokens[:place], episode=None, **_cut(whole, place))
            both = join(earlier, rest)
            torch.testing.assert_close(both.policy_logp, whole.policy_logp, atol=2e-5, rtol=0)
            assert both.episode == whole.episode
    engine.close()


def test_so_many_calls_are_made_at_once(served: InProcessEngine) -> None:
    engine = RoundEpisodes(served, LETTERS, EpisodesConfig(at_once=3))
    played(engine, replace(REQUEST, episode=Game("crowd")))
    assert Crowd.most == 3
    engine.close()


def _cut(whole: Completion, place: int) -> dict[str, torch.Tensor]:
    names = ("sampler_logp", "policy_logp", "entropy", "top_logp")
    return {name: getattr(whole, name)[:place] for name in names}


@each_case(
    "limits, most", [(EpisodesConfig(max_turns=2), 2), (EpisodesConfig(turn_tokens=2), 3), (EpisodesConfig(), 3)]
)
def test_limits_cut_an_episode(served: InProcessEngine, limits: EpisodesConfig, most: int) -> None:
    engine = RoundEpisodes(served, LETTERS, limits)
    sampling = replace(SAMPLING, max_tokens=16)
    cut = 0
    for one in played(engine, REQUEST, sampling):
        turns = turns_of(one)
        lengths = [turn.end - turn.start for turn in turns]
        assert len(turns) <= most and one.length <= 16
        assert limits.turn_tokens is None or max(lengths, default=0) <= limits.turn_tokens
        assert one.episode is not None and one.episode.cut == (len(turns) == most == 2 and not one.episode.failure)
        if one.finish_reason is FinishReason.LENGTH:
            cut += 1
            assert one.episode is not None and one.episode.verdict is not None
            # An answer that the policy cannot read any more is left out.
            assert not turns or turns[-1].until < one.length or turns[-1].until == turns[-1].end
    assert cut
    engine.close()


@pytest.mark.parametrize("limits", [EpisodesConfig(), EpisodesConfig(turn_tokens=30)])
def test_a_requests_own_limit_of_tokens_holds(served: InProcessEngine, limits: EpisodesConfig) -> None:
    engine = RoundEpisodes(served, LETTERS, limits)
    lengths = [one.length for one in played(engine, replace(REQUEST, max_tokens=10))]
    assert max(lengths) == 10 < max(one.length for one in played(engine, REQUEST))
    engine.close()


def test_a_failing_environment_fails_its_own_response_only(served: InProcessEngine) -> None:
    engine = RoundEpisodes(served, LETTERS, EpisodesConfig(step_timeout_s=1.0))
    lost, slow, fine = engine.generate(
        [replace(REQUEST, episode=Game("raises")), replace(REQUEST, episode=Game("sleeps")), REQUEST], SAMPLING
    )
    (left,) = engine.generate([replace(REQUEST, episode=Game("raises", 2))], SAMPLING)
    assert any(one.cause.startswith("Raises.step raised KeyboardInterrupt") for one in left)
    (unmade,) = engine.generate([replace(REQUEST, episode=Game("unmade"))], SAMPLING)
    assert all(one.cause.startswith("making Game raised OSError: no board (") for one in unmade)
    raised = [one for one in lost if one.finish_reason is FinishReason.ABORT]
    assert raised and all("Raises.step raised RuntimeError: the board is lost (" in one.cause for one in raised)
    late = [one for one in slow if one.finish_reason is FinishReason.ABORT]
    assert late and all(one.cause.startswith("Sleeps.step took longer than 1 s (rollout.episodes.") for one in late)
    assert all(one.episode is not None and one.episode.failure == one.cause for one in (*raised, *late))
    assert any(one.finish_reason is FinishReason.STOP for one in fine)
    engine.close()


@each_case(
    "kind, failure",
    [
        (0, ""),
        (1, "Plain.step took longer than 1 s"),
        (2, "Plain.step returned str, which is no"),
        (3, "Plain.step gave the reward nan"),
        (4, "Plain.step says neither a text nor messages"),
        (5, "Plain.step raised RuntimeError: CancelledError"),
        (6, "Plain.step says neither a text nor messages"),
        (7, "Plain.step gave the info None"),
        (8, ""),
        (9, ""),
        (10, "Plain.step gave what cannot be read: "),
        (11, "Plain.step gave what cannot be read: "),
        (12, "Plain.step gave the info correct 'False', which is neither"),
        (13, "Plain.step says neither a text nor messages"),
        (14, ""),
        (15, "Plain.step raised RuntimeError: KeyboardInterrupt"),
    ],
)
def test_plain_functions_may_block_and_nothing_but_observations_counts(
    served: InProcessEngine, kind: int, failure: str
) -> None:
    RELEASED.clear()
    engine = RoundEpisodes(served, LETTERS, EpisodesConfig(step_timeout_s=1.0))
    found = [one for one in played(engine, replace(REQUEST, episode=Game("plain", kind))) if turns_of(one) or one.cause]
    RELEASED.set()
    assert found and all(one.cause.startswith(failure) and bool(one.cause) == bool(failure) for one in found)
    engine.close()


def test_a_coroutine_that_blocks_ends_the_run_and_is_named(served: InProcessEngine) -> None:
    RELEASED.clear()
    engine = RoundEpisodes(served, LETTERS, EpisodesConfig(step_timeout_s=0.2))
    with pytest.raises(UserError, match=r"blocks the event loop .* 0.2 s .* at .*games.py:\d+ in step; await"):
        played(engine, replace(REQUEST, episode=Game("blocks")))
    start = time.monotonic()
    engine.close()
    RELEASED.set()
    assert time.monotonic() - start < 10


@each_case(
    "game, told",
    [
        ("forgets", "gave reward .* and 'b'"),
        ("hurries", "and the end"),
        ("regrets", "gave reward 1 and .*, now 0.5 and"),
    ],
)
def test_an_environment_that_answers_otherwise_on_replay_is_refused(
    engine: RoundEpisodes, game: str, told: str
) -> None:
    request = replace(REQUEST, episode=Game(game))
    Forgets.made = Hurries.made = Regrets.made = 0
    whole = next(one for one in played(engine, replace(request, seeds=(0,)), SAMPLING) if turns_of(one))
    Forgets.made = 4
    first = turns_of(whole)[0]
    begun = tuple(whole.tokens[: first.until].tolist())
    again = replace(request, seeds=(whole.seed,), begun=(begun,), begun_turns=((first,),))
    with pytest.raises(UserError, match=f"answers otherwise than before.*{told}.*from the row"):
        engine.generate([again], SAMPLING)
    engine.close()
    # A second end is none.
    engine.close()
