"""A step's account of its responses: asked for, finished, retried, discarded, dropped, trained.

Collectors and the loop tell a `Tally` what happens; `metrics` gives the row's figures (docs/reference/metrics.md).
A response is known by its seed, so what is sampled of it in several parts, or again, stays one response. Lengths are of
the whole response, all its parts, without what an environment said. A response that was still in flight at the step's
end has no length yet: it counts with the tokens that had arrived.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from megasharp.common.records import Completion, FinishReason, Group, StepBatch

# A kept group too many for the step is dropped for this reason: nothing was wrong with it.
SURPLUS = "surplus"
# Of a cause, what differs from response to response.
_QUOTED = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")


class Tally:
    """Counts one step's responses by what became of them."""

    def __init__(self) -> None:
        self._length: dict[int, int] = {}
        self._asked: list[int] = []
        self._retried: list[int] = []
        self._lengths: dict[str, list[int]] = {"finished": [], "discarded": [], "dropped": [], "trained": []}

    def asked(self, seeds: Iterable[int]) -> None:
        """These responses are asked for, for the first time."""
        self._asked += seeds

    def retried(self, seeds: Iterable[int]) -> None:
        """They are sent again, because an engine failed over them or ended them without a token."""
        self._retried += seeds

    def answered(self, completions: Iterable[Completion]) -> None:
        """An engine's answer came: these are the whole responses so far. An aborted one has not finished."""
        for completion in completions:
            length = self._known(completion)
            if completion.finish_reason is not FinishReason.ABORT:
                self._lengths["finished"].append(length)

    def discarded(self, completions: Iterable[Completion]) -> None:
        """These are thrown away, to be sampled anew. One without a token is no loss, and does not count."""
        self._lengths["discarded"] += [length for completion in completions if (length := self._known(completion))]

    def grouped(self, groups: Sequence[Group], trained: Container[int]) -> None:
        """These are the step's groups; `trained` are the places in the step's flat order that the update reads."""
        places = count()
        for group in groups:
            for response in group.responses:
                self._known(response.completion)
                if group.dropped_reason is None:
                    fate = "trained" if next(places) in trained else "discarded"
                else:
                    fate = "discarded" if group.dropped_reason == SURPLUS else "dropped"
                self._lengths[fate].append(response.policy_tokens)

    def metrics(self) -> dict[str, float]:
        """Return the figures under the names of their metrics. Nothing has no mean and no percentile."""
        lengths = {
            "asked": [self._length.get(seed, 0) for seed in self._asked],
            "retried": [self._length.get(seed, 0) for seed in self._retried],
            **self._lengths,
        }
        return {name: value for what, some in lengths.items() for name, value in _figures(what, some).items()}

    def _known(self, completion: Completion) -> int:
        self._length[completion.seed] = completion.policy_tokens
        return completion.policy_tokens


def _figures(what: str, lengths: Sequence[int]) -> dict[str, float]:
    figures = {f"responses/{what}": float(len(lengths)), f"responses/{what}_tokens": float(sum(lengths))}
    if not lengths:
        return figures
    # The shortest length that nine of ten responses do not exceed.
    at_90 = sorted(lengths)[math.ceil(0.9 * len(lengths) - 1e-9) - 1]
    means = {"mean": sum(lengths) / len(lengths), "p90": float(at_90)}
    return figures | {f"responses/{what}_length_{name}": value for name, value in means.items()}


@dataclass(frozen=True, slots=True)
class Lost:
    """Responses that say nothing of the policy: of `responses`, the lost ones by `causes` in words.

    `environments` counts those whose environment failed; engines ended or never sampled the others.
    """

    responses: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    environments: int = 0

    def __add__(self, other: Lost) -> Lost:
        return Lost(
            self.responses + other.responses, self.causes + other.causes, self.environments + other.environments
        )

    @property
    def count(self) -> int:
        """Number of lost responses."""
        return self.causes.total()

    @property
    def who(self) -> str:
        """Say who lost them, as the beginning of a sentence."""
        if not self.environments:
            return "engines ended or refused"
        return "environments failed in" if self.environments == self.count else "engines or environments failed in"


def lost_responses(groups: Sequence[Group], request_limit_s: float) -> Lost:
    """Count all responses, and those that engines ended or never sampled, or whose environment failed."""
    completions = [response.completion for group in groups for response in group.responses]
    causes: Counter[str] = Counter()
    example: dict[str, str] = {}
    for completion in completions:
        if completion.finish_reason is FinishReason.ABORT:
            cause = completion.cause or (
                f"ended after the first token, as rollout.request_limit_s ({request_limit_s:g} s) does"
                if completion.tokens.numel()
                else "ended before the first token"
            )
            # Two prompts that are too long, each by its own number of tokens, are one cause, and so are two actions.
            causes[example.setdefault(_QUOTED.sub("#", cause), cause)] += 1
    failed = sum(completion.episode is not None and bool(completion.episode.failure) for completion in completions)
    return Lost(len(completions), causes, failed)


def places_in(batch: StepBatch) -> set[int]:
    """Return the places, in the step's flat order, of the responses that have a token in the update."""
    micros = (micro for mini in batch.mini_batches for rank in mini.per_rank for micro in rank)
    return {
        place
        for micro in micros
        for place, tokens in zip(micro.sequence_ids, micro.length_S.tolist(), strict=True)
        if tokens
    }
