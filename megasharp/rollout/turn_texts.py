"""Texts of responses, and where the turns of an episode stand in them.

An episode's text is put together from the texts of its parts, each decoded by itself: as its environment heard the
policy, and so that every part has its place in the text exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megasharp.common.records import Completion, TurnText

Decode = Callable[[Sequence[Sequence[int]]], Sequence[str]]


def decoded(
    completions: Sequence[Completion], decode: Decode, said: Callable[[str], str] = str
) -> list[tuple[str, tuple[TurnText, ...]]]:
    """Return each completion's text and its turns, none without an episode; `said` finishes what the policy says."""
    places = [[*_parts(completion)] for completion in completions]
    tokens = [completion.tokens.tolist() for completion in completions]
    texts = iter(decode([of[start:end] for of, parts in zip(tokens, places, strict=True) for start, end, _ in parts]))
    found = []
    for completion, parts in zip(completions, places, strict=True):
        own = [said(text) if policy else text for (_, _, policy), text in zip(parts, texts, strict=False)]
        found.append(("".join(own), _turns(completion, own)))
    return found


def _parts(completion: Completion) -> Iterator[tuple[int, int, bool]]:
    """Yield places of tokens in turn: the policy's and the environment's, and at the end the policy's again, if any."""
    last = 0
    for turn in completion.episode.turns if completion.episode else ():
        yield turn.start, turn.end, True
        yield turn.end, turn.until, False
        last = turn.until
    length = int(completion.tokens.numel())
    if last < length or not last:
        yield last, length, True


def _turns(completion: Completion, texts: Sequence[str]) -> tuple[TurnText, ...]:
    if completion.episode is None or not completion.tokens.numel():
        return ()
    found: list[TurnText] = []
    place = 0
    for number, turn in enumerate(completion.episode.turns):
        end = place + len(texts[2 * number])
        until = end + len(texts[2 * number + 1])
        found.append(TurnText(turn.start, turn.end, turn.until, place, end, until, turn.reward))
        place = until
    if len(texts) > 2 * len(found):
        # The policy's last words, to which the environment has no answer.
        start, length, end = found[-1].until if found else 0, completion.length, place + len(texts[-1])
        found.append(TurnText(start, length, length, place, end, end, None))
    return tuple(found)
