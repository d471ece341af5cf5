"""One judged sample, as small as figures need it: what is counted now, and stored for an evaluation that goes on later.

Counting reads these records and nothing else, so an evaluation that was resumed is bit for bit the one in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megasharp.evals.answers import AnswerCounts
from megasharp.evals.multiplicity import solution_count
from megasharp.evals.rows import ProblemResult, TokenFigures
from megasharp.types import Completion, FinishReason, Outcome, TaskAnswer, Verdict


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of problem number `problem` (from 0). `seen` are means over its tokens; no tokens, no figures."""

    problem: int
    outcome: Outcome
    answer: str | None
    tokens: int
    truncated: bool
    seen: TokenFigures

    @classmethod
    def of(cls, problem: int, completion: Completion, verdict: Verdict) -> Sample:
        """What a completion and its verdict come to."""
        truncated = completion.finish_reason is FinishReason.LENGTH
        tokens = int(completion.tokens.numel())
        return cls(problem, verdict.outcome, verdict.canonical_answer, tokens, truncated, _token_figures(completion))


def _token_figures(completion: Completion) -> TokenFigures:
    if not completion.tokens.numel():
        return TokenFigures()
    top = completion.top_logp
    return TokenFigures(
        entropy=None if completion.entropy is None else _mean(completion.entropy),
        entropy_sampled=-_mean(completion.sampler_logp),
        lambdas=() if top is None else tuple(top.double().mean(dim=0).tolist()),
        lambda_sample=_mean(completion.policy_logp),
    )


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


class ProblemCounts:
    """Counts one problem's samples; memory grows with its distinct answers only."""

    def __init__(self) -> None:
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._answers = AnswerCounts()
        self._tokens = 0
        self._truncated = 0
        self._responses = 0
        self._sums: list[float] = []
        self._exact = False

    @property
    def drawn(self) -> int:
        """How many samples were counted, INFRA ones included."""
        return sum(self._outcomes.values())

    def add(self, sample: Sample) -> None:
        """Count one sample."""
        self._outcomes[sample.outcome] += 1
        self._tokens += sample.tokens
        self._truncated += sample.truncated
        if sample.outcome is Outcome.INFRA:
            return
        self._answers.add(Verdict(sample.outcome, 0.0, sample.answer))
        self._add_tokens(sample.seen)

    def _add_tokens(self, seen: TokenFigures) -> None:
        if seen.entropy_sampled is None or seen.lambda_sample is None:
            return
        self._responses += 1
        self._exact = seen.entropy is not None
        values = [seen.entropy_sampled, seen.lambda_sample, seen.entropy or 0.0, *seen.lambdas]
        before = self._sums or [0.0] * len(values)
        self._sums = [total + value for total, value in zip(before, values, strict=True)]

    def row(self, problem: str, answer: TaskAnswer, greedy: Outcome | None) -> ProblemResult:
        """Everything that was counted of the problem with this id; `greedy` is the outcome of its greedy response."""
        answers, infra = self._answers.answers(), self._outcomes[Outcome.INFRA]
        solutions = solution_count(answer)
        return ProblemResult(
            id=problem,
            samples=self.drawn - infra,
            correct=self._outcomes[Outcome.CORRECT],
            distinct_correct=answers.distinct_correct,
            wrong=self._outcomes[Outcome.WRONG],
            format=self._outcomes[Outcome.FORMAT],
            error=self._outcomes[Outcome.ERROR],
            timeout=self._outcomes[Outcome.TIMEOUT],
            infra=infra,
            tokens=self._tokens,
            truncated=self._truncated,
            greedy_correct=None if greedy in (None, Outcome.INFRA) else greedy is Outcome.CORRECT,
            answers=answers,
            tokens_seen=self._seen(),
            solutions=solutions,
            solutions_found=None if solutions is None else answers.distinct_correct,
        )

    def _seen(self) -> TokenFigures:
        if not self._responses:
            return TokenFigures()
        sampled, lambda_sample, entropy, *lambdas = (total / self._responses for total in self._sums)
        return TokenFigures(entropy if self._exact else None, sampled, tuple(lambdas), lambda_sample)
