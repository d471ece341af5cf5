"""One prompt on its way to a group: what was sampled of each response so far, and the request in flight."""

from __future__ import annotations

from concurrent.futures import Future

from megasharp.errors import EnginesLost, NotSampled
from megasharp.protocols import AsyncEngine
from megasharp.rollout.joining import ended, join, oldest_version
from megasharp.rollout.unfinished import SampledWith, Unfinished
from megasharp.types import Completion, FinishReason, GenerateRequest, Prompt, SamplingParams


class PromptWork:
    """The responses of one prompt, sampled at once or in several parts.

    `so_far` is what an earlier process sampled of them.
    """

    def __init__(self, prompt: Prompt, request: GenerateRequest, so_far: Unfinished | None = None) -> None:
        so_far = so_far or Unfinished.untouched(prompt, len(request.seeds))
        assert so_far.answers(prompt, request)
        self.prompt = prompt
        self.future: Future[list[Completion]] | None = None
        self._request = request
        self._sampling: SamplingParams | None = None
        self._sampled_with = so_far.sampled_with
        self._begun_by = 0
        self._lost = False
        self._completions = list(so_far.responses)
        # Responses that are not finished, by their index.
        self._open = list(so_far.open)

    @property
    def complete(self) -> bool:
        """Whether every response is finished."""
        return not self._open

    @property
    def begun(self) -> bool:
        """Whether anything was sampled, or may be at this moment."""
        return self.future is not None or any(c is not None and c.tokens.numel() for c in self._completions)

    @property
    def completions(self) -> list[Completion]:
        """What was sampled of each response; only of a complete work."""
        assert self.complete
        return [completion for completion in self._completions if completion is not None]

    @property
    def oldest(self) -> int | None:
        """The oldest version that sampled a token, or may have; None before the first token."""
        found = oldest_version(completion for completion in self._completions if completion is not None)
        if self.future is None:
            return found
        return self._begun_by if found is None else min(found, self._begun_by)

    def fits(self, sampling: SamplingParams) -> bool:
        """Whether what was sampled can be continued so."""
        return self._sampled_with in (None, SampledWith.of(sampling))

    def record(self) -> Unfinished:
        """What is there now: an answer that has arrived counts, a request that is still in flight does not."""
        responses, open_ = list(self._completions), list(self._open)
        future, sampling = self.future, self._sampling
        if future is not None and sampling is not None and future.done() and future.exception() is None:
            for index, part in zip(self._open, future.result(), strict=True):
                responses[index] = self._joined(index, part, sampling)
            open_ = []
        return Unfinished(self.prompt.epoch, self.prompt.position, tuple(responses), tuple(open_), self._sampled_with)

    def begin(self, engine: AsyncEngine, sampling: SamplingParams) -> None:
        """Ask for the responses that are not finished, from where they stand."""
        assert self.future is None and self._open
        self._sampling = sampling
        self._sampled_with = SampledWith.of(sampling)
        self._begun_by = engine.version
        request = GenerateRequest(
            self._request.tokens, tuple(self._request.seeds[index] for index in self._open), self._tokens_so_far()
        )
        self.future = engine.submit(request, sampling)

    def _tokens_so_far(self) -> tuple[tuple[int, ...], ...]:
        """Of each open response; nothing at all where none has a token, which is an ordinary request."""
        parts = [self._completions[index] for index in self._open]
        tokens = tuple(() if part is None else tuple(part.tokens.tolist()) for part in parts)
        return tokens if any(tokens) else ()

    def settle(self, *, aborted: bool = False) -> None:
        """Take the answer of the request in flight. A response that was ended by our abort stays open.

        Raises EnginesLost the first time that engines were lost over this prompt; it can begin again then. Raises
        NotSampled, with the work complete, where its open responses cannot be sampled: they end where they are.
        """
        assert self.future is not None and self._sampling is not None
        future, self.future = self.future, None
        try:
            parts = future.result()
        except NotSampled as error:
            if aborted or (isinstance(error, EnginesLost) and not self._lost):
                self._lost = True
                raise
            self._give_up(self._sampling)
            raise NotSampled(str(error)) from error
        still_open = []
        for index, part in zip(self._open, parts, strict=True):
            reason = self._append(index, part, self._sampling)
            if aborted and reason is FinishReason.ABORT:
                still_open.append(index)
        self._open = still_open

    def _give_up(self, sampling: SamplingParams) -> None:
        for index in self._open:
            self._append(index, Completion.unsampled(self._request.seeds[index], sampling), sampling)
        self._open = []

    def _append(self, index: int, part: Completion, sampling: SamplingParams) -> FinishReason:
        """Join what was sampled now to what there was; returns how the response ended."""
        joined = self._joined(index, part, sampling)
        self._completions[index] = joined
        return joined.finish_reason

    def _joined(self, index: int, part: Completion, sampling: SamplingParams) -> Completion:
        earlier = self._completions[index]
        return ended(part if earlier is None else join(earlier, part), sampling)

    def discard(self) -> None:
        """Throw away what was sampled; the prompt is to be sampled anew."""
        assert self.future is None
        self._sampled_with = None
        self._completions = [None] * len(self._completions)
        self._open = list(range(len(self._completions)))
