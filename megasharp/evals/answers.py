"""The answers among one problem's samples: how many of each, which are correct, how much they vary.

One answer is one canonical answer of the task's verifier: two wrong responses that say the same are one answer. A
correct and a wrong response are never one, whatever their texts. All responses without a canonical answer, whatever is
wrong with them, are together one class of the entropy (2510.04028 C.5); they have no vote in a majority.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from megasharp.types import Outcome, Verdict

# How many answers' texts are kept, those given most often, and how many characters of each.
TEXTS_KEPT = 64
_TEXT_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Answers:
    """How often each answer was given; the most frequent first, ties by text.

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
        """How many different answers are correct."""
        return sum(self.correct)

    @property
    def total(self) -> int:
        """Judged responses, invalid ones included."""
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
    """Counts answers as verdicts come in; long answers are told apart by their digest, so memory stays bounded."""

    _counts: Counter[tuple[bool, str]] = field(default_factory=Counter)
    _invalid: int = 0
    _unnamed: int = 0

    def add(self, verdict: Verdict) -> None:
        """Count one judged response; an INFRA verdict is none."""
        right = verdict.outcome is Outcome.CORRECT
        if verdict.canonical_answer is None:
            self._invalid += 1
            self._unnamed += right
        else:
            self._counts[right, _key(verdict.canonical_answer)] += 1

    def answers(self) -> Answers:
        """What was counted."""
        ranked = sorted(self._counts.items(), key=lambda item: (-item[1], item[0][1], item[0][0]))
        return Answers(
            counts=tuple(count for _, count in ranked),
            correct=tuple(right for (right, _), _ in ranked),
            texts=tuple(text for (_, text), _ in ranked[:TEXTS_KEPT]),
            invalid=self._invalid,
            unnamed=self._unnamed,
        )

    def correct_texts(self) -> Iterable[str]:
        """The correct answers, each once, long ones cut."""
        return (text for right, text in self._counts if right)


def _key(answer: str) -> str:
    """The answer itself; a long one's beginning and digest."""
    if len(answer) <= _TEXT_LENGTH:
        return answer
    digest = hashlib.blake2b(answer.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{answer[: _TEXT_LENGTH - 17]}#{digest}"
