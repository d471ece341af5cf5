"""Sampling a suite through any engine and counting what is correct.

Every sample's seed is a hash of the run's seed, the problem and the sample's number: a model before and after
training is compared over the same seeds, and a figure does not depend on the order or the grouping of
problems.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megasharp.errors import UserError
from megasharp.evals.passk import pass_at_k
from megasharp.evals.result import EvalResult, EvalSetting, ProblemResult, summarize
from megasharp.evals.suites import Suite
from megasharp.protocols import Engine
from megasharp.rewards import VERIFIERS
from megasharp.rewards.judge import DirectJudge, Item, Judge
from megasharp.rollout.groups import judged, response_seed
from megasharp.rollout.order import MemoryUse
from megasharp.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Outcome,
    SamplingParams,
    Verdict,
)

# Samples asked of the engine at once: enough to keep it busy, few enough that their tensors stay small.
CHUNK_SAMPLES = 8192
# A suite's figures under DLC's sampling stand beside the policy's own, under the suite's name and this.
WITH_MEMORY = "+memory"


class Tokenizer(Protocol):
    """What evaluation needs of a tokenizer; `megasharp.data.tokenizer.TextTokenizer` is one."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` without special tokens."""
        ...


@dataclass(slots=True)
class _Tally:
    """Running counts of one problem's samples."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    correct_answers: set[str] = field(default_factory=set)
    tokens: int = 0
    truncated: int = 0
    greedy: Outcome | None = None

    def add(self, completion: Completion, verdict: Verdict) -> None:
        self.outcomes[verdict.outcome] += 1
        self.tokens += int(completion.tokens.numel())
        self.truncated += completion.finish_reason is FinishReason.LENGTH
        if verdict.outcome is Outcome.CORRECT and verdict.canonical_answer is not None:
            self.correct_answers.add(verdict.canonical_answer)


@dataclass(frozen=True, slots=True)
class _Part:
    """Samples `samples` of problem `problem`, both numbered from 0."""

    problem: int
    samples: range


@dataclass(frozen=True, slots=True)
class _Source:
    """Samples of a suite's problems, in chunks of bounded size: asked of the engine, then judged together."""

    engine: Engine
    suite: Suite
    tokenizer: Tokenizer
    judge: Judge
    prompts: Sequence[tuple[int, ...]]
    seed: int
    chunk_samples: int

    def samples(self, n: int, sampling: SamplingParams) -> Iterator[tuple[int, Completion, Verdict]]:
        """Yield (number of the problem, completion, verdict), `n` of each problem."""
        for parts in _chunks(len(self.prompts), n, self.chunk_samples):
            requests = [GenerateRequest(self.prompts[part.problem], self._seeds(part)) for part in parts]
            sampled = self.engine.generate(requests, sampling)
            problems = [part.problem for part, some in zip(parts, sampled, strict=True) for _ in some]
            completions = [completion for some in sampled for completion in some]
            items = [self._item(*pair) for pair in zip(problems, completions, strict=True)]
            yield from zip(problems, completions, judged(self.judge, completions, items), strict=True)

    def _item(self, problem: int, completion: Completion) -> Item:
        text = self.tokenizer.decode(completion.tokens.tolist())
        return Item(self.suite.task, text, self.suite.items[problem].answer)

    def _seeds(self, part: _Part) -> tuple[int, ...]:
        problem = self.suite.items[part.problem].id
        return tuple(sample_seed(self.seed, problem, index) for index in part.samples)


def _chunks(problems: int, n: int, size: int) -> Iterator[list[_Part]]:
    """Parts of at most `size` samples together; a problem with more samples is spread over several chunks."""
    parts: list[_Part] = []
    room = size
    for problem in range(problems):
        start = 0
        while start < n:
            end = min(n, start + room)
            parts.append(_Part(problem, range(start, end)))
            room -= end - start
            start = end
            if room == 0:
                yield parts
                parts, room = [], size
    if parts:
        yield parts


def evaluate(
    engine: Engine,
    suite: Suite,
    tokenizer: Tokenizer,
    *,
    n: int,
    ks: Sequence[int],
    temperature: float,
    max_tokens: int,
    seed: int,
    label: str = "",
    step: int | None = None,
    greedy: bool = True,
    memory: MemoryUse | None = None,
    judge: Judge | None = None,
    chunk_samples: int = CHUNK_SAMPLES,
) -> EvalResult:
    """Sample every problem of `suite` `n` times at `temperature`, and once greedily if `greedy`.

    `max_tokens` bounds a response, `label` and `step` name the model in the result; without a `judge` this process
    judges. At most `chunk_samples` samples are in memory at once. A verifier that raises counts as the outcome ERROR;
    an INFRA outcome is not counted as a sample, and a problem left with fewer than max(ks) samples is left out (and
    counted in `left_out`). With `memory`, its logits are subtracted as in training rollouts, and the result is named
    after the suite and `WITH_MEMORY`: a figure of its own beside the policy's.

    Raises:
        UserError: some k is not in 1..n, the task has no verifier, infra failures left no problem to score,
        or what
            the engine raises for its arguments.
    """
    for k in ks:
        pass_at_k(n, 0, k)
    judge = judge or DirectJudge(VERIFIERS)
    _check_task(suite, judge)
    prompts = [tokenizer.encode(item.text) for item in suite.items]
    source = _Source(engine, suite, tokenizer, judge, prompts, seed, chunk_samples)
    sampling = SamplingParams(max_tokens, temperature, stop_token_ids=tokenizer.stop_token_ids)
    name = suite.name
    if memory is not None:
        sampling = replace(sampling, memory_mu=memory.mu, plausible=memory.plausible)
        name += WITH_MEMORY
    start = time.perf_counter()
    tallies = [_Tally() for _ in suite.items]
    for problem, completion, verdict in source.samples(n, sampling):
        tallies[problem].add(completion, verdict)
    if greedy:
        for problem, _, verdict in source.samples(1, replace(sampling, temperature=0.0)):
            tallies[problem].greedy = verdict.outcome
    return summarize(
        [_row(item.id, tally) for item, tally in zip(suite.items, tallies, strict=True)],
        EvalSetting(name, label, step, n, tuple(ks), temperature, seed),
        seconds=time.perf_counter() - start,
    )


def sample_seed(seed: int, problem: str, index: int) -> int:
    """The engine seed of sample `index` of a problem: 63 bits, the same in every process and machine."""
    return response_seed(seed, f"eval/{problem}", 0, index)


def _check_task(suite: Suite, judge: Judge) -> None:
    if suite.task not in judge.tasks:
        raise UserError(
            f"suite {suite.name}: task {suite.task!r} has no verifier; tasks with one: {', '.join(sorted(judge.tasks))}"
        )


def _row(problem: str, tally: _Tally) -> ProblemResult:
    infra = tally.outcomes[Outcome.INFRA]
    return ProblemResult(
        id=problem,
        samples=tally.outcomes.total() - infra,
        correct=tally.outcomes[Outcome.CORRECT],
        distinct_correct=len(tally.correct_answers),
        wrong=tally.outcomes[Outcome.WRONG],
        format=tally.outcomes[Outcome.FORMAT],
        error=tally.outcomes[Outcome.ERROR],
        timeout=tally.outcomes[Outcome.TIMEOUT],
        infra=infra,
        tokens=tally.tokens,
        truncated=tally.truncated,
        greedy_correct=None if tally.greedy in (None, Outcome.INFRA) else tally.greedy is Outcome.CORRECT,
    )
