"""Judged samples and the counts of one problem: outcomes, answers, and means over its responses' tokens.

Counting reads what is stored of samples and nothing else, and goes by their index, so the counts are the same bit for
bit in whatever order samples came and however often the evaluation was interrupted.

One answer is one canonical answer of the task's verifier: two wrong responses that say the same are one answer. A
correct and a wrong response are never one, whatever their texts. All responses without a canonical answer, whatever is
wrong with them, are together one class of the entropy (2510.04028 C.5); they have no vote in a majority.

Solution multiplicity is the number of distinct solutions of a problem, where a solver knows (2511.19942 equation 2).
The paper counts a suite's mean; here each problem has its own, and the share of its solutions among the samples. One
solution is one canonical answer: an expression up to order and nesting for Countdown.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torch import Tensor

from megasharp.common.records import Completion, FinishReason, Outcome, TaskAnswer, Verdict
from megasharp.evals.stored_samples import StoredSample
from megasharp.tasks.countdown import CountdownAnswer, count_solutions
from megasharp.tasks.countdown_tags import TaggedCountdownAnswer
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.knights import KnightsAnswer
from megasharp.tasks.maze import MazeAnswer

# Number of answers whose texts are kept, those given most often, and of characters of each.
TEXTS_KEPT = 64
_TEXT_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to one problem and their counts; the most frequent first, ties by text.

    `counts` and `correct` have an entry per answer, `texts` one for each of the first `TEXTS_KEPT`, cut at 200
    characters. `invalid` counts judged responses without a canonical answer, `unnamed` those of them that are correct
    (a verifier that gives no canonical answers).

    Example: `Answers(counts=(5, 2), correct=(True, False), texts=("1+2", "1*2"), invalid=1, unnamed=0)`.
    """

    counts: tuple[int, ...]
    correct: tuple[bool, ...]
    texts: tuple[str, ...]
    invalid: int
    unnamed: int

    @property
    def distinct_correct(self) -> int:
        """The number of different correct answers."""
        return sum(self.correct)

    @property
    def total(self) -> int:
        """The number of judged responses, invalid ones included."""
        return sum(self.counts) + self.invalid

    @property
    def entropy(self) -> float:
        """-sum p ln p over answers, invalid responses as one class, in nats (2510.04028 C.5).

        It is of the samples at hand: with few of them it is too low, so it compares between equal numbers of samples.
        """
        total = self.total
        shares = [count / total for count in (*self.counts, self.invalid) if count]
        return -sum(share * math.log(share) for share in shares) + 0.0


@dataclass(slots=True)
class AnswerCounts:
    """Counts answers as verdicts come in; long answers are identified by their digest, so memory stays bounded."""

    _counts: Counter[tuple[bool, str]] = field(default_factory=Counter)
    _invalid: int = 0
    _unnamed: int = 0

    def add(self, verdict: Verdict) -> None:
        """Count one judged response; an INFRA verdict is none."""
        right, answer = verdict.outcome is Outcome.CORRECT, verdict.canonical_answer
        if answer is None:
            self._invalid += 1
            self._unnamed += right
            return
        if len(answer) > _TEXT_LENGTH:
            digest = hashlib.blake2b(answer.encode(errors="surrogatepass"), digest_size=8).hexdigest()
            answer = f"{answer[: _TEXT_LENGTH - 17]}#{digest}"
        self._counts[right, answer] += 1

    def answers(self) -> Answers:
        """Return the answers counted so far."""
        ranked = sorted(self._counts.items(), key=lambda item: (-item[1], item[0][1], item[0][0]))
        return Answers(
            counts=tuple(count for _, count in ranked),
            correct=tuple(right for (right, _), _ in ranked),
            texts=tuple(text for (_, text), _ in ranked[:TEXTS_KEPT]),
            invalid=self._invalid,
            unnamed=self._unnamed,
        )


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Means over a problem's responses of each one's mean over its tokens, in nats, at the sampling temperature.

    `entropy` is exact: that of the policy's next-token distribution over the whole vocabulary (2510.04028 C.5).
    `entropy_sampled` is -log of the probability that each sampled token was drawn with: an estimate of the entropy of
    what was sampled from, after top-p and all else that changes it. Summed over a response both have the same
    expectation where nothing is cut off; the means over tokens differ a little, because a response's length depends on
    its tokens.
    `lambdas[n - 1]` is Lambda(n), of the log-prob of the policy's n-th likeliest token, and `lambda_sample` of the
    sampled one's (2510.14807 equation 2; there at the training temperature).
    None, or empty, where the engine does not report it.
    """

    entropy: float | None = None
    entropy_sampled: float | None = None
    lambdas: tuple[float, ...] = ()
    lambda_sample: float | None = None


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """One problem's samples. `samples` counts the judged ones, so not `infra`; `tokens` is over all.

    `correct`, `wrong`, `format`, `error`, `timeout` and `infra` count outcomes, `distinct_correct` the
    canonical answers among the correct ones, `truncated` responses that met the length limit.
    `solutions` is the number of distinct solutions of the problem, where a solver knows, `solutions_found` of those
    among the samples. `answers` is None in files that older versions wrote. `turns` counts those of all samples, where
    an environment answers.
    """

    id: str
    samples: int
    correct: int
    distinct_correct: int
    wrong: int
    format: int
    error: int
    timeout: int
    infra: int
    tokens: int
    truncated: int
    greedy_correct: bool | None
    answers: Answers | None = None
    tokens_seen: TokenFigures = TokenFigures()
    solutions: int | None = None
    solutions_found: int | None = None
    turns: int | None = None

    @property
    def share_of_solutions(self) -> float | None:
        """The share of the problem's solutions that was found; None without a solver, or without a solution."""
        if self.solutions is None or self.solutions_found is None or not self.solutions:
            return None
        return self.solutions_found / self.solutions


# Five numbers take the solver about a second a problem; a suite would wait for minutes.
_MOST_NUMBERS = 4


def solution_count(answer: TaskAnswer) -> int | None:
    """Count the distinct solutions of a problem; None where no solver knows, or it would take long.

    Countdown with up to four numbers is searched whole; a puzzle of knights and knaves has one solution by its making.
    """
    match answer:
        case CountdownAnswer(numbers, target) | TaggedCountdownAnswer(numbers, target):
            return _countdown(tuple(sorted(numbers)), target)
        case KnightsAnswer():
            return 1
        case MazeAnswer():
            return answer.solutions
        case _:
            return None


@lru_cache(maxsize=1 << 16)
def _countdown(numbers: tuple[int, ...], target: int) -> int | None:
    return count_solutions(numbers, target) if 1 <= len(numbers) <= _MOST_NUMBERS else None


def token_figures(completion: Completion) -> TokenFigures:
    """Return the means over a response's tokens, taken in float64; all None without tokens, or their log-probs.

    So they are where one is not finite, as a log-prob of -inf makes it: it has no part in a mean over problems.
    """
    if not completion.sampler_logp.numel():
        return TokenFigures()
    own = completion.of_policy
    top = () if completion.top_logp is None else own(completion.top_logp).double().mean(dim=0).tolist()
    sampled, lambda_sample = -_mean(own(completion.sampler_logp)), _mean(own(completion.policy_logp))
    entropy = None if completion.entropy is None else _mean(own(completion.entropy))
    if not all(map(math.isfinite, (entropy or 0.0, sampled, lambda_sample, *top))):
        return TokenFigures()
    return TokenFigures(entropy, sampled, tuple(top), lambda_sample)


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


class ProblemCounts:
    """Counts one problem's samples; memory grows with its distinct answers only."""

    def __init__(self) -> None:
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._answers = AnswerCounts()
        self._tokens = 0
        self._truncated = 0
        self._turns = 0
        self._responses = 0
        self._sums: list[float] = []
        self._exact = False

    @property
    def drawn(self) -> int:
        """The number of samples counted, INFRA ones included."""
        return sum(self._outcomes.values())

    def add(self, sample: StoredSample) -> None:
        """Count one sample."""
        self._outcomes[sample.outcome] += 1
        self._tokens += sample.tokens
        self._truncated += sample.finish is FinishReason.LENGTH
        self._turns += len(sample.turns)
        if sample.outcome is Outcome.INFRA:
            return
        self._answers.add(Verdict(sample.outcome, sample.reward, sample.answer))
        # A response without tokens has no means.
        if sample.entropy_sampled is None or sample.lambda_sample is None:
            return
        self._responses += 1
        self._exact = sample.entropy is not None
        values = [sample.entropy_sampled, sample.lambda_sample, sample.entropy or 0.0, *sample.lambdas]
        before = self._sums or [0.0] * len(values)
        self._sums = [total + value for total, value in zip(before, values, strict=True)]

    def row(self, problem: str, answer: TaskAnswer, greedy: Outcome | None) -> ProblemResult:
        """Return all counts of the problem with this id; `greedy` is the outcome of its greedy response."""
        answers, infra = self._answers.answers(), self._outcomes[Outcome.INFRA]
        solutions = solution_count(answer)
        seen = TokenFigures()
        if self._responses:
            sampled, lambda_sample, entropy, *lambdas = (total / self._responses for total in self._sums)
            seen = TokenFigures(entropy if self._exact else None, sampled, tuple(lambdas), lambda_sample)
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
            tokens_seen=seen,
            solutions=solutions,
            solutions_found=None if solutions is None else answers.distinct_correct,
            turns=self._turns or None,
        )


class SuiteCounts:
    """Counts a suite's samples in any order: `n` of each problem, and a greedy one where `greedy`.

    A problem is counted when its last sample has come, then its samples are forgotten. `samples` and `tokens` are what
    came so far.
    """

    def __init__(self, items: Sequence[TaskItem], n: int, greedy: bool) -> None:
        self._items = items
        self._n, self._greedy = n, greedy
        self._waiting: dict[int, dict[tuple[bool, int], StoredSample]] = {}
        self._rows: dict[int, ProblemResult] = {}
        self.samples = self.tokens = 0

    @property
    def wanted(self) -> int:
        """Number of all samples."""
        return len(self._items) * (self._n + self._greedy)

    @property
    def complete(self) -> int:
        """Number of problems all of whose samples have come."""
        return len(self._rows)

    @property
    def problems(self) -> int:
        """Number of problems."""
        return len(self._items)

    @property
    def mean_of_complete(self) -> float:
        """Mean tokens of a sample of complete problems, of which there is one; greedy ones are left out."""
        return sum(row.tokens for row in self._rows.values()) / (len(self._rows) * self._n)

    def add(self, sample: StoredSample) -> None:
        """Take one sample; one that is there already, or that nobody asked for, counts nothing."""
        number, place = sample.number, (sample.greedy, sample.index)
        asked = self._greedy if sample.greedy else sample.index < self._n
        if number in self._rows or not asked:
            return
        waiting = self._waiting.setdefault(number, {})
        if place in waiting:
            return
        waiting[place] = replace(sample, text=None, token_ids=None, detail="")
        self.samples += 1
        self.tokens += sample.tokens
        if len(waiting) == self._n + self._greedy:
            counts = ProblemCounts()
            for index in range(self._n):
                counts.add(waiting[False, index])
            favourite = waiting[True, 0].outcome if self._greedy else None
            self._rows[number] = counts.row(self._items[number].id, self._items[number].answer, favourite)
            del self._waiting[number]

    def missing(self, number: int, greedy: bool) -> list[int]:
        """Return the indexes of a problem's greedy sample, or of its others, that have not come."""
        if number in self._rows or (greedy and not self._greedy):
            return []
        there = self._waiting.get(number, {})
        return [index for index in range(1 if greedy else self._n) if (greedy, index) not in there]

    def rows(self) -> list[ProblemResult]:
        """Return a row for each problem, all of which are complete."""
        return [self._rows[number] for number in range(len(self._items))]
