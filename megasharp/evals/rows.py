"""What an evaluation keeps of one problem: counts, its answers, and what its responses' tokens tell."""

from __future__ import annotations

from dataclasses import dataclass

from megasharp.evals.answers import Answers


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
    None, or empty, where the engine does not tell.
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
    `solutions` is how many distinct solutions the problem has, where a solver knows, `solutions_found` how many of them
    are among the samples. `answers` is None in files that older versions wrote.
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

    @property
    def share_of_solutions(self) -> float | None:
        """The share of the problem's solutions that was found; None without a solver, or without a solution."""
        if self.solutions is None or self.solutions_found is None or not self.solutions:
            return None
        return self.solutions_found / self.solutions
