"""Sampling a suite through any engine and counting what is correct.

Every sample's seed is a hash of the run's seed, the problem and the sample's number: a model before and after
training is compared over the same seeds, and a figure does not depend on the order or the grouping of
problems.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megasharp.data.chat import prompt_of
from megasharp.errors import UserError
from megasharp.evals.passk import pass_at_k
from megasharp.evals.progress import Progress
from megasharp.evals.result import EvalResult, EvalSetting, summarize
from megasharp.evals.rows import ProblemResult
from megasharp.evals.samples import ProblemCounts, Sample
from megasharp.evals.suites import Suite
from megasharp.protocols import Engine
from megasharp.rewards import VERIFIERS
from megasharp.rewards.judge import DirectJudge, Item, Judge
from megasharp.rollout.groups import judged, response_seed
from megasharp.rollout.order import MemoryUse
from megasharp.types import (
    Completion,
    GenerateRequest,
    Outcome,
    SamplingParams,
)

CHUNK_SAMPLES = 8192
CHUNK_TOKENS = 1 << 24
_FEWEST = 512
# Lambda(1) to Lambda(3), as CaSP's figures have them.
CANDIDATES = 3
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

    def chat(self, turns: Sequence[tuple[str, str]]) -> str:
        """The text that the model's chat template makes of messages."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` without special tokens."""
        ...


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
    progress: Progress | None

    def chunks(self, kind: str, n: int, sampling: SamplingParams) -> Iterator[tuple[list[Sample], float]]:
        """Yield chunks of samples, `n` of each problem in all, with the seconds each took, maybe in an earlier attempt.

        `kind` begins the names that chunks are stored under.
        """
        for number, parts in enumerate(_chunks(len(self.prompts), n, self.chunk_samples)):
            name = f"{kind}_{number:06d}"
            stored = self.progress.read(name) if self.progress else None
            if stored is not None:
                yield stored
                continue
            start = time.perf_counter()
            samples = self._sample(parts, sampling)
            seconds = time.perf_counter() - start
            if self.progress:
                self.progress.write(name, samples, seconds)
            yield samples, seconds

    def _sample(self, parts: Sequence[_Part], sampling: SamplingParams) -> list[Sample]:
        requests = [GenerateRequest(self.prompts[part.problem], self._seeds(part)) for part in parts]
        sampled = self.engine.generate(requests, sampling)
        problems = [part.problem for part, some in zip(parts, sampled, strict=True) for _ in some]
        completions = [completion for some in sampled for completion in some]
        items = [self._item(*pair) for pair in zip(problems, completions, strict=True)]
        verdicts = judged(self.judge, completions, items)
        return [Sample.of(*each) for each in zip(problems, completions, verdicts, strict=True)]

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
    top_p: float = 1.0,
    label: str = "",
    step: int | None = None,
    greedy: bool = True,
    memory: MemoryUse | None = None,
    judge: Judge | None = None,
    chunk_samples: int | None = None,
    progress: Progress | None = None,
    identity: Mapping[str, str] | None = None,
) -> EvalResult:
    """Sample every problem of `suite` `n` times at `temperature` and `top_p`, and once greedily if `greedy`.

    `max_tokens` bounds a response, `label` and `step` name the model in the result; without a `judge` this process
    judges. At most `chunk_samples` samples are in memory at once (by default `chunk_size`). A verifier that raises
    counts as the outcome ERROR; an INFRA outcome is not counted as a sample, and a problem left with fewer than max(ks)
    samples is left out (and counted in `left_out`). With `memory`, its logits are subtracted as in training rollouts,
    and the result is named after the suite and `WITH_MEMORY`: a figure of its own beside the policy's.
    With `progress`, chunks that are stored there are not sampled again, and new ones are stored; it must have been
    opened for this very evaluation, which `identity` describes in the result.

    Raises:
        UserError: some k is not in 1..n, the task has no verifier, infra failures left no problem to score,
        or what
            the engine raises for its arguments.
    """
    for k in ks:
        pass_at_k(n, 0, k)
    judge = judge or DirectJudge(VERIFIERS)
    _check_task(suite, judge)
    prompts = [tokenizer.encode(prompt_of(item, tokenizer)) for item in suite.items]
    source = _Source(engine, suite, tokenizer, judge, prompts, seed, chunk_samples or chunk_size(max_tokens), progress)
    sampling = SamplingParams(
        max_tokens, temperature, top_p, stop_token_ids=tokenizer.stop_token_ids, record_top=CANDIDATES
    )
    if memory is not None:
        sampling = replace(sampling, memory_mu=memory.mu, plausible=memory.plausible)
    rows, seconds = _counted(source, n, sampling, greedy)
    name = suite.name if memory is None else suite.name + WITH_MEMORY
    setting = EvalSetting(
        name, label, step, n, tuple(ks), temperature, seed, top_p, max_tokens, identity=identity or {}
    )
    return summarize(rows, setting, seconds)


def _counted(source: _Source, n: int, sampling: SamplingParams, greedy: bool) -> tuple[list[ProblemResult], float]:
    """A row per problem, and the seconds that sampling and judging took. A problem is counted up, then forgotten."""
    seconds = 0.0
    favourites: dict[int, Outcome] = {}
    if greedy:
        greedily = replace(sampling, temperature=0.0, top_p=1.0, record_top=None)
        for chunk, took in source.chunks("greedy", 1, greedily):
            favourites |= {sample.problem: sample.outcome for sample in chunk}
            seconds += took
    rows: list[ProblemResult] = []
    counts = ProblemCounts()
    for chunk, took in source.chunks("samples", n, sampling):
        seconds += took
        for sample in chunk:
            assert sample.problem == len(rows), "chunks go through the problems in order"
            counts.add(sample)
            if counts.drawn == n:
                item = source.suite.items[sample.problem]
                rows.append(counts.row(item.id, item.answer, favourites.get(sample.problem)))
                counts = ProblemCounts()
    return rows, seconds


def chunk_size(max_tokens: int) -> int:
    """How many responses of up to `max_tokens` tokens are sampled before the next are asked for.

    Enough to keep engines busy; few enough that their tensors stay small, and that little is lost with a chunk.
    """
    return min(CHUNK_SAMPLES, max(_FEWEST, CHUNK_TOKENS // max_tokens))


def sample_seed(seed: int, problem: str, index: int) -> int:
    """The engine seed of sample `index` of a problem: 63 bits, the same in every process and machine."""
    return response_seed(seed, f"eval/{problem}", 0, index)


def _check_task(suite: Suite, judge: Judge) -> None:
    if suite.task not in judge.tasks:
        raise UserError(
            f"suite {suite.name}: task {suite.task!r} has no verifier; tasks with one: {', '.join(sorted(judge.tasks))}"
        )
