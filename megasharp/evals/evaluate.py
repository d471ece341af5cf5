"""Sampling a suite through any engine and counting correct responses.

Every sample's seed is a hash of the run's seed, the problem and the sample's number: a model before and after training
is compared over the same seeds, and a metric does not depend on the order or the grouping of problems.

A request is for a few samples of one problem. Requests of many problems are in flight; each is judged when its samples
have ended, while sampling goes on, and committed to the store. An evaluation with the same identity takes what is
stored and samples the rest. Counting goes by the samples' index, so equal samples give equal figures, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megasharp.common.errors import UserError
from megasharp.common.records import Completion, GenerateRequest, Outcome, SamplingParams, TurnText, Verdict
from megasharp.evals.estimators import pass_at_k
from megasharp.evals.judging import Finished, Judging
from megasharp.evals.progress import ProgressLines
from megasharp.evals.result import EvalResult, EvalSetting, summarize
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.samples import SuiteCounts, token_figures
from megasharp.evals.stored_samples import StoredSample
from megasharp.evals.suites import Suite
from megasharp.rollout.step_request import Engine, MemoryUse, episode_of, judged, response_seed, streamed
from megasharp.rollout.streaming import Asked
from megasharp.rollout.turn_texts import decoded
from megasharp.tasks.final_answer import AnswerRule, FinalJudge, opens_thinking
from megasharp.tasks.judge import DirectJudge, Item, Judge
from megasharp.tasks.stream import ChatEncoder, ReadPrompt, read_prompt
from megasharp.tasks.table import make_verifiers

# Lambda(1) to Lambda(3), as CaSP's figures have them.
CANDIDATES = 3
# A suite's metrics under DLC's sampling are stored beside the policy's own, under the suite's name and this.
WITH_MEMORY = "+memory"
# A request has as many samples as have about so many tokens, which wait for its longest one and are lost with it, and
# at most so many: more share their prompt's computation, but not noticeably.
_REQUEST_TOKENS = 1 << 14
_REQUEST_SAMPLES = 8


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
    """Samples of problem `number` that are asked for together, and when they were."""

    number: int
    greedy: bool
    indexes: Sequence[int]
    since: float


@dataclass(slots=True)
class _Source:
    """The samples of a suite that are still to be drawn, as requests; `open` are those that were asked for."""

    suite: Suite
    prompts: Sequence[ReadPrompt]
    seed: int
    counts: SuiteCounts
    sampling: SamplingParams
    size: int
    open: dict[int, _Part] = field(default_factory=dict)

    def asked(self) -> Iterator[Asked]:
        """Yield the requests in order, greedy ones first, as they are wanted."""
        greedily = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, record_top=None)
        # Known before the first is judged: what comes meanwhile has been asked for.
        missing = [
            (number, greedy, self.counts.missing(number, greedy))
            for greedy in (True, False)
            for number in range(len(self.prompts))
        ]
        place = 0
        for number, greedy, indexes in missing:
            for start in range(0, len(indexes), self.size):
                part = _Part(number, greedy, indexes[start : start + self.size], time.monotonic())
                self.open[place] = part
                place += 1
                item = self.suite.items[number]
                seeds = tuple(sample_seed(self.seed, item.id, index) for index in part.indexes)
                tokens = self.prompts[number].tokens
                # Without tokens the engine writes the prompt itself.
                turns = () if tokens else item.turns or (("user", item.text),)
                request = GenerateRequest(tokens, seeds, turns=turns, episode=episode_of(item.answer))
                yield request, greedily if greedy else self.sampling

    def finished(self, place: int, completions: Sequence[Completion]) -> Finished:
        """Return the request at this place with its completions."""
        part = self.open.pop(place)
        return Finished(part.number, part.greedy, part.indexes, completions, time.monotonic() - part.since)


@dataclass(frozen=True, slots=True)
class _Verification:
    """Turns completions into judged samples."""

    suite: Suite
    tokenizer: Tokenizer | None
    judge: Judge
    prompts: Sequence[ReadPrompt]
    sampling: SamplingParams

    def samples(self, finished: Sequence[Finished]) -> list[StoredSample]:
        """Judge several requests together, greedy ones by themselves: a reward may compare a problem's responses."""
        kinds = ([one for one in finished if one.greedy], [one for one in finished if not one.greedy])
        return [sample for some in kinds if some for sample in self._judged(some)]

    def _judged(self, finished: Sequence[Finished]) -> list[StoredSample]:
        start = time.monotonic()
        places = [
            (one, index, completion)
            for one in finished
            for index, completion in zip(one.indexes, one.completions, strict=True)
        ]
        completions = [completion for _, _, completion in places]
        sampled = [completion.tokens.tolist() for completion in completions]
        told = decoded(completions, self._decode, self.sampling.text)
        texts = [
            text if completion.text is None else self.sampling.text(completion.text)
            for completion, (text, _) in zip(completions, told, strict=True)
        ]
        items = [
            Item.of(
                self.suite.items[one.number],
                self.suite.task,
                text,
                tokens=tokens,
                in_thinking=opens_thinking(self.prompts[one.number].text),
            )
            for (one, _, _), text, tokens in zip(places, texts, sampled, strict=True)
        ]
        verdicts = judged(self.judge, completions, items, [turns for _, turns in told])
        each = (time.monotonic() - start) / max(1, len(places))
        return [
            self._sample(one, index, completion, item, verdict, turns, each)
            for (one, index, completion), item, verdict, (_, turns) in zip(places, items, verdicts, told, strict=True)
        ]

    def _decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return ["" if self.tokenizer is None else self.tokenizer.decode(tokens) for tokens in rows]

    def _sample(
        self,
        one: Finished,
        index: int,
        completion: Completion,
        item: Item,
        verdict: Verdict,
        turns: tuple[TurnText, ...],
        judged_s: float,
    ) -> StoredSample:
        seen = token_figures(completion)
        answer = verdict.canonical_answer
        return StoredSample(
            problem=self.suite.items[one.number].id,
            number=one.number,
            index=index,
            greedy=one.greedy,
            seed=completion.seed,
            text=_storable(item.text),
            token_ids=item.tokens if completion.text is None else None,
            finish=completion.finish_reason,
            outcome=verdict.outcome,
            reward=verdict.reward,
            answer=None if answer is None else _storable(answer),
            detail=_storable(verdict.detail),
            tokens=completion.policy_tokens,
            entropy=seen.entropy,
            entropy_sampled=seen.entropy_sampled,
            lambdas=seen.lambdas,
            lambda_sample=seen.lambda_sample,
            sampled_s=one.sampled_s,
            judged_s=judged_s,
            in_thinking=item.in_thinking,
            turns=turns,
        )


def _storable(text: str) -> str:
    """Return a text that UTF-8 can hold: lone surrogates become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def evaluate(
    engine: Engine,
    suite: Suite,
    tokenizer: Tokenizer | None,
    setting: EvalSetting,
    *,
    greedy: bool = True,
    memory: MemoryUse | None = None,
    judge: Judge | None = None,
    store: SampleStore | None = None,
    together: bool = False,
    say: Callable[[str], None] | None = None,
) -> EvalResult:
    """Sample every problem of `suite` as `setting` says, and once greedily if `greedy`.

    Without a `tokenizer` requests carry messages, and completions texts; without a `judge` this process judges. A
    verifier that raises counts as the outcome ERROR; an INFRA outcome is not counted as a sample, and a problem left
    with fewer than max(ks) samples is left out (and counted in `left_out`). With `memory`, its logits are subtracted as
    in training rollouts (DLC). What `store` holds is not sampled again, and new samples are committed to it; it must
    have been opened for this very evaluation. It is left to the caller to finish it, once the result is stored. With
    `together` a problem's samples are one request, and are judged in one call, for a reward that compares them. `say`
    gets lines of progress.

    Raises:
        UserError: some k is not in 1..n, the task has no verifier, infra failures left no problem to score, or the
            engine refuses its arguments.
    """
    # Refuses a k that n samples cannot give, before any is drawn.
    for k in setting.ks:
        pass_at_k(setting.n, 0, k)
    judge = judge or FinalJudge(DirectJudge(make_verifiers()), AnswerRule())
    if suite.task not in judge.tasks:
        known = ", ".join(sorted(judge.tasks))
        raise UserError(f"suite {suite.name}: task {suite.task!r} has no verifier; tasks with one: {known}")
    counts = SuiteCounts(suite.items, setting.n, greedy)
    if store is not None:
        for sample in store.stored():
            counts.add(sample)
    prompts = [ReadPrompt("", ()) if tokenizer is None else read_prompt(item, tokenizer) for item in suite.items]
    size = setting.n if together else min(_REQUEST_SAMPLES, max(1, _REQUEST_TOKENS // (setting.max_tokens or 1)))
    sampling = _sampling(setting, tokenizer, memory)
    source = _Source(suite, prompts, setting.seed, counts, sampling, size)
    verification = _Verification(suite, tokenizer, judge, prompts, sampling)
    seconds = _sample(engine, source, verification, store, say or (lambda _: None))
    return summarize(counts.rows(), setting, seconds)


def _sampling(setting: EvalSetting, tokenizer: Tokenizer | None, memory: MemoryUse | None) -> SamplingParams:
    assert setting.max_tokens is not None
    sampling = SamplingParams(
        setting.max_tokens,
        setting.temperature,
        setting.top_p,
        setting.top_k,
        stop_token_ids=() if tokenizer is None else tokenizer.stop_token_ids,
        record_top=CANDIDATES,
        min_p=setting.min_p,
        stop=tuple(setting.stop),
    )
    if memory is None:
        return sampling
    return replace(sampling, memory_mu=memory.mu, plausible=memory.plausible)


def _sample(
    engine: Engine, source: _Source, verification: _Verification, store: SampleStore | None, say: Callable[[str], None]
) -> float:
    """Sample, judge and count all that is missing; return the seconds that all attempts took."""
    before = 0.0 if store is None else store.seconds
    counts = source.counts
    if counts.samples == counts.wanted:
        return before
    start = last = time.perf_counter()
    lines = ProgressLines(source.suite.name, counts, say)
    told = False

    def commit(samples: Sequence[StoredSample]) -> None:
        nonlocal last, told
        now = time.perf_counter()
        if store is not None:
            store.add(samples, now - last)
        last = now
        for sample in samples:
            counts.add(sample)
            if sample.outcome is Outcome.INFRA and not told:
                say(f"{source.suite.name}: a sample of {sample.problem} says nothing of the model: {sample.detail}")
                told = True
        lines.update()

    with Judging(verification.samples, commit) as judging, streamed(engine, source.asked()) as ended:
        for place, completions in ended:
            judging.put(source.finished(place, completions))
    return before + time.perf_counter() - start


def sample_seed(seed: int, problem: str, index: int) -> int:
    """Return the engine seed of sample `index` of a problem: 63 bits, the same in every process and machine."""
    return response_seed(seed, f"eval/{problem}", 0, index)
