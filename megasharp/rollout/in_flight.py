"""Prompts on their way to a group: what was sampled of each response so far, and the request in flight.

A response may be sampled in several parts, perhaps by several policy versions: `join` puts them together, and
`staleness` says how old its tokens are. `PromptWork` is one prompt with its responses and the request in flight.

`Unfinished` is what a checkpoint keeps of a prompt that was taken but that no step has trained on. A resumed run goes
on from there: finished responses are not sampled again, and what was in flight is requested again. A response's seed
comes from the run's seed and its prompt (`step_request.response_seed`), so no engine has a state to keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megasharp.common.errors import EnginesLost, NotSampled
from megasharp.common.records import (
    Completion,
    FinishReason,
    GenerateRequest,
    Group,
    Prompt,
    SamplingParams,
    VersionSpan,
)
from megasharp.rollout.step_request import AsyncEngine
from megasharp.rollout.tally import Tally


@dataclass(frozen=True, slots=True)
class SampledWith:
    """Conditions of the parts sampled last: the limit of tokens, and whether the memory network was read.

    `begun` is the limit under which the prompt's first token was sampled, where a later stage of `data.stages` has
    another one; else None.
    """

    max_tokens: int
    memory: bool
    begun: int | None = None

    @classmethod
    def of(cls, sampling: SamplingParams, earlier: SampledWith | None = None) -> SampledWith:
        """Of a request's parameters, which may go on with what was sampled by `earlier` ones."""
        begun = None if earlier is None else earlier.begun or earlier.max_tokens
        return cls(sampling.max_tokens, sampling.memory_mu is not None, begun if begun != sampling.max_tokens else None)

    def fits(self, sampling: SamplingParams) -> bool:
        """Return True where these parameters ask for the same."""
        return (self.max_tokens, self.memory) == (sampling.max_tokens, sampling.memory_mu is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Unfinished:
    """A prompt, by its place in the stream, and its responses so far: None before the first token of one.

    `open` are the indices of responses that are not finished. `sampled_with` is None where nothing was asked yet.

    Example: `Unfinished(0, 17, (first, None), open=(1,), sampled_with=SampledWith(1024, memory=False))`.
    """

    epoch: int
    position: int
    responses: tuple[Completion | None, ...]
    open: tuple[int, ...]
    sampled_with: SampledWith | None

    @classmethod
    def untouched(cls, prompt: Prompt, responses: int) -> Unfinished:
        """A prompt of which nothing was sampled."""
        return cls(prompt.epoch, prompt.position, (None,) * responses, tuple(range(responses)), None)

    def answers(self, prompt: Prompt, request: GenerateRequest) -> bool:
        """Return True where these are responses to this request: seeds come from the run's seed and the prompt.

        Data may have changed since, and then another prompt is at this place.
        """
        if self.place != (prompt.epoch, prompt.position) or len(self.responses) != len(request.seeds):
            return False
        pairs = zip(self.responses, request.seeds, strict=True)
        return all(response is None or response.seed == seed for response, seed in pairs)

    @property
    def has_experts(self) -> bool:
        """True where all responses that have tokens have experts, too."""
        begun = [response for response in self.responses if response is not None and response.tokens.numel()]
        return all(response.experts is not None for response in begun)

    @property
    def place(self) -> tuple[int, int]:
        """The prompt's (epoch, position)."""
        return self.epoch, self.position


def join(earlier: Completion, later: Completion) -> Completion:
    """Join two parts of a response along their tokens; it ended as `later` ended.

    Version spans of `later` count from its own first token; adjacent spans of one version become one. A field that one
    part lacks is None: so are the memory network's where it read one part alone. Experts of both begin with the prompt:
    tokens that were read with `earlier` keep theirs.
    """
    if not earlier.tokens.numel():
        return later
    if not later.tokens.numel():
        episode = later.episode or earlier.episode
        return replace(earlier, finish_reason=later.finish_reason, cause=later.cause, episode=episode)
    offset = earlier.tokens.numel()
    moved = (VersionSpan(span.version, span.start + offset, span.end + offset) for span in later.version_spans)
    spans: list[VersionSpan] = []
    for span in (*earlier.version_spans, *moved):
        if spans and spans[-1].version == span.version and spans[-1].end == span.start:
            spans[-1] = replace(spans[-1], end=span.end)
        else:
            spans.append(span)
    return Completion(
        tokens=torch.cat([earlier.tokens, later.tokens]),
        sampler_logp=torch.cat([earlier.sampler_logp, later.sampler_logp]),
        policy_logp=torch.cat([earlier.policy_logp, later.policy_logp]),
        memory_logp=_joined(earlier.memory_logp, later.memory_logp),
        version_spans=tuple(spans),
        finish_reason=later.finish_reason,
        seed=later.seed,
        argmax_moved=_joined(earlier.argmax_moved, later.argmax_moved),
        calibration_kl=_joined(earlier.calibration_kl, later.calibration_kl),
        entropy=_joined(earlier.entropy, later.entropy),
        top_logp=_joined(earlier.top_logp, later.top_logp),
        cause=later.cause,
        episode=later.episode,
        experts=_joined_experts(earlier.experts, later.experts),
    )


def _joined_experts(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
    if earlier is None or later is None:
        return None
    # Empty are those of an environment's tokens, which nobody has read yet.
    if not earlier.numel() or not later.numel():
        return earlier if earlier.numel() else later
    return torch.cat([earlier, later[earlier.shape[0] :]])


def _met(response: Completion, limit: int) -> bool:
    """Return True where the limit of tokens ended a response, or left an environment's answer no room."""
    episode, length = response.episode, response.length
    if episode is None or episode.cut or not episode.turns:
        return length >= limit
    return length >= limit or episode.turns[-1].until == episode.turns[-1].end == length


def ended(response: Completion, sampling: SamplingParams) -> Completion:
    """Return the response, with its own end in place of an abort that came after its last token.

    The end of an episode is its environment's affair.
    """
    if response.finish_reason is not FinishReason.ABORT or not response.tokens.numel() or response.episode is not None:
        return response
    if int(response.tokens[-1]) in sampling.stop_token_ids:
        return replace(response, finish_reason=FinishReason.STOP)
    if response.tokens.numel() >= sampling.max_tokens:
        return replace(response, finish_reason=FinishReason.LENGTH)
    return response


def _joined(earlier_T: Tensor | None, later_T: Tensor | None) -> Tensor | None:
    return None if earlier_T is None or later_T is None else torch.cat([earlier_T, later_T])


def oldest_version(completions: Iterable[Completion]) -> int | None:
    """The oldest policy version that sampled a token; None where there is no token."""
    return min((span.version for completion in completions for span in completion.version_spans), default=None)


def staleness(groups: Sequence[Group]) -> dict[str, float]:
    """Measure how many versions tokens are older than their group's policy.

    Returns `rollout/staleness_mean` and `rollout/staleness_max` over all tokens; empty where there are none.
    """
    behind = [
        (group.policy_version - span.version, span.end - span.start)
        for group in groups
        for response in group.responses
        for span in response.completion.version_spans
    ]
    tokens = sum(count for _, count in behind)
    if not tokens:
        return {}
    return {
        "rollout/staleness_mean": sum(versions * count for versions, count in behind) / tokens,
        "rollout/staleness_max": float(max(versions for versions, _ in behind)),
    }


class PromptWork:
    """The responses of one prompt, sampled at once or in several parts.

    `so_far` is what an earlier process sampled of them. What happens to them goes into the step's `tally`.
    """

    def __init__(self, prompt: Prompt, request: GenerateRequest, so_far: Unfinished | None = None) -> None:
        so_far = so_far or Unfinished.untouched(prompt, len(request.seeds))
        assert so_far.answers(prompt, request)
        self.prompt = prompt
        self.future: Future[list[Completion]] | None = None
        self._request = request
        self._sampling: SamplingParams | None = None
        self._sampled_with = so_far.sampled_with
        self._asked = so_far.sampled_with is not None
        self._begun_by = 0
        self._lost = False
        self._completions = list(so_far.responses)
        # Responses that are not finished, by their index.
        self._open = list(so_far.open)

    @property
    def complete(self) -> bool:
        """True where every response is finished."""
        return not self._open

    @property
    def begun(self) -> bool:
        """True where anything was sampled, or may be at this moment."""
        return self.future is not None or any(c is not None and c.tokens.numel() for c in self._completions)

    @property
    def in_flight(self) -> list[int]:
        """Seeds of the responses that are asked for and not answered."""
        return [] if self.future is None else [self._request.seeds[index] for index in self._open]

    @property
    def completions(self) -> list[Completion]:
        """The responses of a complete work, in the order of the request's seeds."""
        assert self.complete
        return [completion for completion in self._completions if completion is not None]

    @property
    def oldest(self) -> int | None:
        """The oldest version that sampled a token, or may have; None before the first token."""
        found = oldest_version(completion for completion in self._completions if completion is not None)
        if self.future is None:
            return found
        return self._begun_by if found is None else min(found, self._begun_by)

    @property
    def begun_limit(self) -> int | None:
        """The limit of tokens under which it was begun; None before."""
        used = self._sampled_with
        return None if used is None else used.begun or used.max_tokens

    def limit(self, sampling: SamplingParams) -> int:
        """Return its limit of tokens under a step's parameters."""
        return self._request.under(sampling).max_tokens

    def fits(self, sampling: SamplingParams) -> bool:
        """Return True where what is sampled, or in flight, needs no change to go on with these parameters."""
        return self._sampled_with is None or self._sampled_with.fits(self._request.under(sampling))

    def renewed(self, request: GenerateRequest) -> PromptWork:
        """Return it as `request` asks, where nothing is sampled or in flight: a later stage may want more responses."""
        if self._sampled_with is not None or self._request == request:
            return self
        work = PromptWork(self.prompt, request)
        work._asked = self._asked
        return work

    def go_on_with(self, sampling: SamplingParams) -> None:
        """Put responses of an unfinished prompt, none in flight, under another step's limit of tokens.

        Under a longer one a response that the limit before had cut goes on, so that a group's responses can be
        compared. Under a shorter one a response that is already so long ends where it is; an episode stays open, since
        its environment has the verdict.
        """
        assert self.future is None
        sampling, used = self._request.under(sampling), self._sampled_with
        if used is None or not self._open or used.fits(sampling):
            return
        limit, still_open = sampling.max_tokens, []
        for index, response in enumerate(self._completions):
            length = 0 if response is None else response.tokens.numel()
            cut = response is not None and response.finish_reason is FinishReason.LENGTH and index not in self._open
            if response is not None and index in self._open and length >= limit and response.episode is None:
                self._completions[index] = replace(response, finish_reason=FinishReason.LENGTH)
            elif response is not None and cut and length < limit and _met(response, used.max_tokens):
                self._completions[index] = replace(response, finish_reason=FinishReason.ABORT)
                still_open.append(index)
            elif index in self._open:
                still_open.append(index)
        self._open = still_open
        self._sampled_with = SampledWith.of(sampling, used if self.begun else None)

    def record(self) -> Unfinished:
        """Return what is there now: an answer that has arrived counts, a request that is still in flight does not."""
        responses, open_ = list(self._completions), list(self._open)
        future, sampling = self.future, self._sampling
        if future is not None and sampling is not None and future.done() and future.exception() is None:
            for index, part in zip(self._open, future.result(), strict=True):
                responses[index] = self._joined(index, part, sampling)
            open_ = []
        return Unfinished(self.prompt.epoch, self.prompt.position, tuple(responses), tuple(open_), self._sampled_with)

    def begin(self, engine: AsyncEngine, sampling: SamplingParams, tally: Tally) -> None:
        """Ask for the responses that are not finished, from where they stand."""
        assert self.future is None and self._open
        if not self._asked:
            tally.asked(self._request.seeds)
            self._asked = True
        self._sampling = sampling = self._request.under(sampling)
        self._sampled_with = SampledWith.of(sampling, self._sampled_with if self.begun else None)
        self._begun_by = engine.version
        parts = [self._completions[index] for index in self._open]
        begun = tuple(() if part is None else tuple(part.tokens.tolist()) for part in parts)
        seeds = tuple(self._request.seeds[index] for index in self._open)
        # Where no response has a token yet it is an ordinary request, without `begun`.
        request = GenerateRequest(self._request.tokens, seeds, begun if any(begun) else ())
        if self._request.episode is not None:
            turns = tuple(() if part is None or part.episode is None else part.episode.turns for part in parts)
            request = replace(request, episode=self._request.episode, begun_turns=turns if any(begun) else ())
        self.future = engine.submit(request, sampling)

    def settle(self, tally: Tally, *, aborted: bool = False) -> None:
        """Take the answer of the request in flight. A response that was ended by our abort stays open.

        Raises EnginesLost the first time that engines were lost over this prompt; it can begin again then. Raises
        NotSampled, with the work complete, where its open responses cannot be sampled: they end where they are.
        """
        assert self.future is not None and self._sampling is not None
        future, self.future = self.future, None
        try:
            parts = future.result()
        except NotSampled as error:
            # A prompt over which engines were lost is asked for once more, and then given up.
            if aborted or (isinstance(error, EnginesLost) and not self._lost):
                self._lost = True
                if not aborted:
                    tally.retried(self._request.seeds[index] for index in self._open)
                raise
            for index in self._open:
                lost = Completion.unsampled(self._request.seeds[index], self._sampling, cause=str(error))
                self._append(index, lost, self._sampling)
            self._open = []
            raise NotSampled(str(error)) from error
        still_open = []
        for index, part in zip(self._open, parts, strict=True):
            joined = self._append(index, part, self._sampling)
            tally.answered([joined])
            if aborted and joined.finish_reason is FinishReason.ABORT:
                still_open.append(index)
        self._open = still_open

    def _append(self, index: int, part: Completion, sampling: SamplingParams) -> Completion:
        """Join what was sampled now to what there was; returns the response so far."""
        joined = self._joined(index, part, sampling)
        self._completions[index] = joined
        return joined

    def _joined(self, index: int, part: Completion, sampling: SamplingParams) -> Completion:
        earlier = self._completions[index]
        return ended(part if earlier is None else join(earlier, part), sampling)

    def discard(self, tally: Tally) -> None:
        """Throw away what was sampled; the prompt is to be sampled again from its start."""
        assert self.future is None
        tally.discarded(completion for completion in self._completions if completion is not None)
        self._sampled_with = None
        self._completions = [None] * len(self._completions)
        self._open = list(range(len(self._completions)))
