"""Places of turns in tokens and text, and what tables and metrics make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import torch

from megasharp.common.records import (
    Completion,
    Episode,
    FinishReason,
    Group,
    Outcome,
    Prompt,
    Response,
    TaskAnswer,
    Turn,
    TurnText,
    Verdict,
    VersionSpan,
)
from megasharp.metrics.group_metrics import group_metrics
from megasharp.metrics.response_table import write_rollouts
from megasharp.rollout.tally import lost_responses
from megasharp.rollout.turn_texts import decoded

WORDS = ("", "ab", "c", "\u00e9", "|", "def")
VERDICT = Verdict(Outcome.WRONG, 0.5)


def decode(rows: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(WORDS[token] for token in row) for row in rows]


def completion(tokens: Sequence[int], *turns: Turn, episode: Episode | None = None) -> Completion:
    logp = torch.zeros(len(tokens))
    spans = (VersionSpan(0, 0, len(tokens)),)
    own = episode or Episode(turns, VERDICT)
    return Completion(torch.tensor(tokens), logp, logp, None, spans, FinishReason.STOP, 1, episode=own)


PLAYED = completion([1, 0, 3, 4, 5, 2, 0, 4, 1, 5], Turn(0, 2, 4, 0.25), Turn(4, 7, 8, 0.25))


def test_every_part_has_its_place_in_the_text() -> None:
    plain = replace(PLAYED, episode=None)
    begun, nothing = completion([2], Turn(0, 1, 1, -1.0)), completion([])
    (whole, turns), alone, one, none = decoded([PLAYED, plain, begun, nothing], decode)
    assert whole == "ab\u00e9|defc|abdef"
    assert turns == (
        TurnText(0, 2, 4, 0, 2, 4, 0.25),
        TurnText(4, 7, 8, 4, 8, 9, 0.25),
        # Cut short, so that its environment did not answer.
        TurnText(8, 10, 10, 9, 14, 14, None),
    )
    assert alone == (whole, ()) and one == ("c", (TurnText(0, 1, 1, 0, 1, 1, -1.0),)) and none == ("", ())


def test_a_stop_string_is_cut_off_what_the_policy_says_alone() -> None:
    ((text, turns),) = decoded([PLAYED], decode, lambda said: said.removesuffix("c"))
    assert text == "ab\u00e9|def|abdef" and [text[turn.text_start : turn.text_end] for turn in turns][1] == "def"


def group(*completions: Completion) -> Group:
    prompt = Prompt("p", "game", "q", (1,), TaskAnswer(), "d", 0, 0)
    made = [Response(one, *_told(one)) for one in completions]
    return Group("step1-0", prompt, tuple(made), 0)


def _told(one: Completion) -> tuple[str, Verdict, tuple[TurnText, ...]]:
    ((text, turns),) = decoded([one], decode)
    failed = one.episode is not None and one.episode.failure
    return text, Verdict(Outcome.INFRA, 0.0) if failed else VERDICT, turns


def test_the_table_says_whose_text_is_whose(tmp_path: Path) -> None:
    rows = pq.read_table(write_rollouts(tmp_path, 1, [group(PLAYED, replace(PLAYED, episode=None))])).to_pylist()
    played, plain = rows
    assert (played["turns"], played["length"]) == (3, 7) and (plain["turns"], plain["length"]) == (None, 10)
    places = played["turn_places"]
    assert [played["text"][one["text_end"] : one["text_until"]] for one in places] == ["\u00e9|", "|", ""]
    assert [one["reward"] for one in places] == [0.25, 0.25, None] and plain["turn_places"] is None


def test_metrics_count_what_the_policy_said_and_turns_only_of_episodes() -> None:
    failure = "Raises.step raised ValueError: no square 3 for 'a' (games.py:3)"
    lost = [
        replace(
            completion([1, 0, 3], episode=Episode((Turn(0, 2, 3),), None, failure=said)),
            finish_reason=FinishReason.ABORT,
            cause=said,
        )
        for said in (failure, failure.replace("3 for 'a'", "14 for 'b'"))
    ]
    ended = replace(completion([1, 0]), finish_reason=FinishReason.LENGTH)
    cut = replace(ended, episode=Episode((Turn(0, 2, 2),), VERDICT, cut=True))
    groups = [group(PLAYED, cut, *lost)]
    found = group_metrics(groups)
    assert (found["rollout/tokens"], found["rollout/length_max"], found["rollout/context_max"]) == (13, 7, 10)
    assert (found["rollout/turns"], found["rollout/turn_tokens"]) == (1.5, 13 / 6)
    assert found["rollout/truncated"] == 0 and group_metrics([group(ended)])["rollout/truncated"] == 1
    assert (found["rollout/turns_cut"], found["rollout/environment_failed"]) == (0.25, 0.5)
    assert found["rollout/environment_tokens"] == 1 - 13 / 18
    assert not [name for name in group_metrics([group(replace(PLAYED, episode=None))]) if "turn" in name]
    told = lost_responses(groups, 1.0)
    assert (told.responses, told.who, [*told.causes.values()]) == (4, "environments failed in", [2])
