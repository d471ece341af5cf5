"""Sampling a suite through any engine and counting correct responses.

Every sample's seed is a hash of the run's seed, the problem and the sample's number: a model before and after training
is compared over the same seeds, and a metric does not depend on the order or the grouping of problems.

Samples come in chunks, and `Progress` keeps them on disk: a small table per chunk, and the identity of the evaluation.
A chunk appears under its name only when it is whole. An evaluation with the same identity reads the chunks that are
there and samples the others; another identity is refused.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megasharp.common.errors import UserError, one_line
from megasharp.common.files import completed, write_text
from megasharp.common.formats import read_stamp, stamp
from megasharp.common.records import Completion, GenerateRequest, Outcome, SamplingParams
from megasharp.evals.estimators import pass_at_k
from megasharp.evals.result import EvalResult, EvalSetting, summarize
from megasharp.evals.samples import ProblemCounts, ProblemResult, Sample, TokenFigures
from megasharp.evals.suites import Suite
from megasharp.metrics.parquet import arrow, parquet
from megasharp.rollout.step_request import Engine, MemoryUse, judged, response_seed, streamed
from megasharp.rollout.streaming import Ended
from megasharp.tasks.final_answer import AnswerRule, FinalJudge, opens_thinking
from megasharp.tasks.judge import DirectJudge, Item, Judge
from megasharp.tasks.stream import ChatEncoder, ReadPrompt, read_prompt
from megasharp.tasks.table import make_verifiers

if TYPE_CHECKING:
    import pyarrow as pa

_IDENTITY = "identity.json"
_SECONDS = b"seconds"


@cache
def _schema() -> pa.Schema:
    """A row for each sample of a chunk."""
    pa = arrow()
    return pa.schema(
        [
            pa.field("problem", pa.int32()),
            pa.field("outcome", pa.string()),
            pa.field("answer", pa.string()),
            pa.field("tokens", pa.int32()),
            pa.field("truncated", pa.bool_()),
            pa.field("entropy", pa.float64()),
            pa.field("entropy_sampled", pa.float64()),
            pa.field("lambdas", pa.list_(pa.float64())),
            pa.field("lambda_sample", pa.float64()),
        ]
    )


class Progress:
    """The chunks of one evaluation, in a folder of its own."""

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        """Open `folder`, or make it with the first chunk.

        Raises UserError where it holds another evaluation's samples or a later release's, or cannot be read.
        """
        self._folder = folder
        self._identity = dict(identity)
        path = folder / _IDENTITY
        if not path.exists():
            return
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            # Format 1 (1ee861e, 2026-11-22, to 255d13e, 2026-11-24) differs by having no `format`.
            read_stamp(path, "evaluation samples", tree)
            found = {str(name): str(value) for name, value in tree.items() if name not in ("format", "megasharp")}
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{path}: cannot be read ({one_line(error)}); remove {path.parent}") from error
        check_identity(found, self._identity, f"{folder} holds samples")

    @property
    def samples(self) -> int:
        """The number of samples stored."""
        return sum(parquet().read_metadata(path).num_rows for path in self._folder.glob("*.parquet"))

    def holds(self, name: str) -> bool:
        """Return whether a chunk is stored."""
        return self._path(name).exists()

    def read(self, name: str) -> tuple[list[Sample], float] | None:
        """Read the samples of a chunk, and the seconds they took; None where it is not there.

        Raises UserError for a file that is no chunk.
        """
        path = self._path(name)
        if not path.exists():
            return None
        try:
            table = parquet().read_table(path)
            return list(_samples(table)), float(table.schema.metadata[_SECONDS])
        except (OSError, arrow().ArrowException, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({one_line(error)}); remove it to sample it again") from error

    def write(self, name: str, samples: Sequence[Sample], seconds: float) -> None:
        """Store a chunk. Raises UserError where the disk refuses."""
        if not (self._folder / _IDENTITY).exists():
            tree = {**stamp("evaluation samples"), **self._identity}
            write_text(self._folder / _IDENTITY, json.dumps(tree, indent=1) + "\n")
        table = arrow().Table.from_pylist([_record(sample) for sample in samples], schema=_schema())
        with completed(self._path(name)) as temporary:
            parquet().write_table(table.replace_schema_metadata({_SECONDS: repr(seconds)}), temporary)

    def remove(self) -> None:
        """Remove all of it: the result is stored."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.parquet"


def check_identity(found: Mapping[str, str], asked: Mapping[str, str], where: str) -> None:
    """Raise UserError, naming the first difference, unless both are the same evaluation; `where` begins its line."""
    for name in (*asked, *found):
        there, here = found.get(name), asked.get(name)
        if there != here:
            raise UserError(
                f"{where} of another evaluation ({name} {there or 'unknown'}, now {here or 'unknown'}); "
                "give another --out, or remove it"
            )


def _record(sample: Sample) -> dict[str, Any]:
    seen = sample.seen
    return {
        "problem": sample.problem,
        "outcome": str(sample.outcome),
        "answer": sample.answer,
        "tokens": sample.tokens,
        "truncated": sample.truncated,
        "entropy": seen.entropy,
        "entropy_sampled": seen.entropy_sampled,
        "lambdas": list(seen.lambdas),
        "lambda_sample": seen.lambda_sample,
    }


def _samples(table: pa.Table) -> Iterator[Sample]:
    for record in table.to_pylist():
        seen = TokenFigures(
            record["entropy"], record["entropy_sampled"], tuple(record["lambdas"]), record["lambda_sample"]
        )
        yield Sample(
            problem=record["problem"],
            outcome=Outcome(record["outcome"]),
            answer=record["answer"],
            tokens=record["tokens"],
            truncated=record["truncated"],
            seen=seen,
        )


CHUNK_SAMPLES = 8192
CHUNK_TOKENS = 1 << 24
_FEWEST = 512
# Lambda(1) to Lambda(3), as CaSP's figures have them.
CANDIDATES = 3
# A suite's metrics under DLC's sampling are stored beside the policy's own, under the suite's name and this.
WITH_MEMORY = "+memory"


class Tokenizer(ChatEncoder, Protocol):
    """The part of a tokenizer that evaluation uses; `megasharp.tasks.tokenizer.TextTokenizer` is one."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """Some samples of one problem, both numbered from 0."""

    problem: int
    samples: range


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Samples that are judged and stored together; `greedily` ones are one of each problem."""

    name: str
    parts: Sequence[_Part]
    sampling: SamplingParams
    greedily: bool


@dataclass(frozen=True, slots=True)
class _Source:
    """Samples of a suite's problems, in chunks of bounded size: asked of the engine, then judged together."""

    engine: Engine
    suite: Suite
    tokenizer: Tokenizer
    judge: Judge
    prompts: Sequence[ReadPrompt]
    seed: int
    chunk_samples: int
    progress: Progress | None

    def planned(self, n: int, sampling: SamplingParams, greedy: bool) -> list[_Chunk]:
        """Return the chunks in order: with `greedy` those of one greedy sample each, then those of `n` samples each."""
        greedily = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, record_top=None)
        passes = [("greedy", 1, greedily)] if greedy else []
        return [
            _Chunk(f"{kind}_{number:06d}", parts, asked, asked is greedily)
            for kind, count, asked in (*passes, ("samples", n, sampling))
            for number, parts in enumerate(_chunks(len(self.prompts), count, self.chunk_samples))
        ]

    def requests(self, chunk: _Chunk) -> list[GenerateRequest]:
        """Make the requests of a chunk, one a part."""
        requests = []
        for part in chunk.parts:
            problem = self.suite.items[part.problem].id
            seeds = tuple(sample_seed(self.seed, problem, index) for index in part.samples)
            requests.append(GenerateRequest(self.prompts[part.problem].tokens, seeds))
        return requests

    def taken(self, chunks: Sequence[_Chunk], ended: Iterator[Ended]) -> Iterator[tuple[_Chunk, list[Sample], float]]:
        """Yield each chunk's samples, and the seconds from the chunk before to its own end, maybe in another attempt.

        What is stored is read; the others take as many of the requests that end as they have parts.
        """
        first, found = 0, dict[int, list[Completion]]()
        for chunk in chunks:
            stored = self.progress.read(chunk.name) if self.progress else None
            if stored is not None:
                yield chunk, *stored
                continue
            start = time.perf_counter()
            places = range(first, first + len(chunk.parts))
            first = places.stop
            while any(place not in found for place in places):
                place, completions = next(ended)
                found[place] = completions
            samples = self._judged(chunk, [found.pop(place) for place in places])
            seconds = time.perf_counter() - start
            if self.progress:
                self.progress.write(chunk.name, samples, seconds)
            yield chunk, samples, seconds

    def _judged(self, chunk: _Chunk, sampled: Sequence[Sequence[Completion]]) -> list[Sample]:
        problems = [part.problem for part, some in zip(chunk.parts, sampled, strict=True) for _ in some]
        completions = [completion for some in sampled for completion in some]
        sampled_tokens = [completion.tokens.tolist() for completion in completions]
        texts = [chunk.sampling.text(self.tokenizer.decode(tokens)) for tokens in sampled_tokens]
        asked = [self.suite.items[problem] for problem in problems]
        items = [
            Item(
                self.suite.task,
                text,
                item.answer,
                item.question or item.text,
                item.messages,
                item.row,
                tokens,
                in_thinking=opens_thinking(self.prompts[problem].text),
            )
            for tokens, text, item, problem in zip(sampled_tokens, texts, asked, problems, strict=True)
        ]
        verdicts = judged(self.judge, completions, items)
        return [Sample.of(*each) for each in zip(problems, completions, verdicts, strict=True)]


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
    top_k: int = 0,
    min_p: float = 0.0,
    stop: Sequence[str] = (),
    label: str = "",
    step: int | None = None,
    greedy: bool = True,
    memory: MemoryUse | None = None,
    judge: Judge | None = None,
    chunk_samples: int | None = None,
    progress: Progress | None = None,
    identity: Mapping[str, str] | None = None,
) -> EvalResult:
    """Sample every problem of `suite` `n` times at `temperature`, and once greedily if `greedy`.

    `top_p`, `top_k`, `min_p` and `stop` are those of `SamplingParams`; greedy sampling takes `stop` only.
    `max_tokens` bounds a response, `label` and `step` name the model in the result; without a `judge` this process
    judges. At most `chunk_samples` samples (by default `chunk_size`) are in flight at once. A verifier that
    raises counts as the outcome ERROR; an INFRA outcome is not counted as a sample, and a problem left with fewer than
    max(ks) samples is left out (and counted in `left_out`). With `memory`, its logits are subtracted as in training
    rollouts (DLC), and the result is named after the suite and `WITH_MEMORY`, so that it has metrics of its own. With
    `progress`, chunks that are stored there are not sampled again, and new ones are stored; it must have been opened
    for this very evaluation, which `identity` describes in the result.

    Raises:
        UserError: some k is not in 1..n, the task has no verifier, infra failures left no problem to score, or the
            engine refuses its arguments.
    """
    # Refuses a k that n samples cannot give, before any is drawn.
    for k in ks:
        pass_at_k(n, 0, k)
    judge = judge or FinalJudge(DirectJudge(make_verifiers()), AnswerRule())
    if suite.task not in judge.tasks:
        known = ", ".join(sorted(judge.tasks))
        raise UserError(f"suite {suite.name}: task {suite.task!r} has no verifier; tasks with one: {known}")
    prompts = [read_prompt(item, tokenizer) for item in suite.items]
    source = _Source(engine, suite, tokenizer, judge, prompts, seed, chunk_samples or chunk_size(max_tokens), progress)
    sampling = SamplingParams(
        max_tokens,
        temperature,
        top_p,
        top_k,
        stop_token_ids=tokenizer.stop_token_ids,
        record_top=CANDIDATES,
        min_p=min_p,
        stop=tuple(stop),
    )
    if memory is not None:
        sampling = replace(sampling, memory_mu=memory.mu, plausible=memory.plausible)
    rows, seconds = _counted(source, n, sampling, greedy)
    name = suite.name if memory is None else suite.name + WITH_MEMORY
    setting = EvalSetting(
        name,
        label,
        step,
        n,
        tuple(ks),
        temperature,
        seed,
        top_p,
        max_tokens,
        identity or {},
        top_k,
        min_p,
        sampling.stop,
    )
    return summarize(rows, setting, seconds)


def _counted(source: _Source, n: int, sampling: SamplingParams, greedy: bool) -> tuple[list[ProblemResult], float]:
    """A row per problem, and the seconds that sampling and judging took. A problem is counted up, then forgotten."""
    seconds = 0.0
    favourites: dict[int, Outcome] = {}
    rows: list[ProblemResult] = []
    counts = ProblemCounts()
    chunks = source.planned(n, sampling, greedy)
    missing = [chunk for chunk in chunks if source.progress is None or not source.progress.holds(chunk.name)]
    asked = ((request, chunk.sampling) for chunk in missing for request in source.requests(chunk))
    with streamed(source.engine, asked, source.chunk_samples) as ended:
        for chunk, samples, took in source.taken(chunks, ended):
            seconds += took
            if chunk.greedily:
                favourites |= {sample.problem: sample.outcome for sample in samples}
                continue
            for sample in samples:
                assert sample.problem == len(rows), "chunks go through the problems in order"
                counts.add(sample)
                if counts.drawn == n:
                    item = source.suite.items[sample.problem]
                    rows.append(counts.row(item.id, item.answer, favourites.get(sample.problem)))
                    counts = ProblemCounts()
    return rows, seconds


def chunk_size(max_tokens: int) -> int:
    """Return the number of responses, of up to `max_tokens` tokens each, that are sampled together.

    Enough to keep engines busy; few enough that their tensors stay small, and that little is lost with a chunk.
    """
    return min(CHUNK_SAMPLES, max(_FEWEST, CHUNK_TOKENS // max_tokens))


def sample_seed(seed: int, problem: str, index: int) -> int:
    """Return the engine seed of sample `index` of a problem: 63 bits, the same in every process and machine."""
    return response_seed(seed, f"eval/{problem}", 0, index)
