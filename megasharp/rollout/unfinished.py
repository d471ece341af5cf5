"""Prompts that were taken but that no step has trained on, and what was sampled of them.

A resumed run goes on from there: finished responses are not sampled again, and what was in flight is asked for anew.
A response's seed comes from the run's seed and its prompt (`groups.response_seed`), so no engine has a state to keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from megasharp.types import Completion, GenerateRequest, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class SampledWith:
    """What two parts of one response must have in common: the limit, and whether the memory network was read.

    What ended at another limit would not have ended here, and log-probs of the memory are there for all tokens or none.
    """

    max_tokens: int
    memory: bool

    @classmethod
    def of(cls, sampling: SamplingParams) -> SampledWith:
        """Of a request's parameters."""
        return cls(sampling.max_tokens, sampling.memory_mu is not None)


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
        """Whether these are responses to this request: by their seeds, which come from the run's seed and the prompt.

        Data may have changed since, and then another prompt is at this place.
        """
        if self.place != (prompt.epoch, prompt.position) or len(self.responses) != len(request.seeds):
            return False
        pairs = zip(self.responses, request.seeds, strict=True)
        return all(response is None or response.seed == seed for response, seed in pairs)

    @property
    def place(self) -> tuple[int, int]:
        """The prompt's (epoch, position)."""
        return self.epoch, self.position
