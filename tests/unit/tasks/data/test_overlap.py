"""Overlap of texts: against a second implementation, on made-up texts with known copies, and at the edges."""

from __future__ import annotations

import re
from random import Random

from cases import each_case

from megasharp.evals.contamination import OverlapIndex, words_of
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.math import MathAnswer


def item(name: str, question: str) -> TaskItem:
    return TaskItem(name, "math", f"A prompt of words: {question}", MathAnswer("1"), "t", question=question)


def index_of(questions: list[str], n: int) -> OverlapIndex:
    index = OverlapIndex(n)
    index.add("suite", [item(f"q{number}", question) for number, question in enumerate(questions)])
    return index


def share(one: str, other: str, n: int) -> bool:
    """The definition, word by word, in quadratic time."""
    a, b = (re.sub(r"[^a-z0-9 ]", " ", text.lower()).split() for text in (one, other))
    if len(b) < n:
        return a == b
    return any(a[i : i + n] == b[j : j + n] for i in range(len(a) - n + 1) for j in range(len(b) - n + 1))


@each_case("seed", range(20))
def test_it_is_the_definition(seed: int) -> None:
    """Of 7 words only, so that runs of three are often shared."""
    rng = Random(seed)
    text = lambda: " ".join(rng.choice(["a", "b", "c", "d", "e", "f", "g"]) for _ in range(rng.randint(1, 12)))  # noqa: E731
    questions, n = [text() for _ in range(30)], 3
    index = index_of(questions, n)
    for _ in range(30):
        ours = text()
        found = [overlap.problem for overlap in index.overlaps(ours)]
        assert found == [f"q{number}" for number, question in enumerate(questions) if share(ours, question, n)]


def test_case_punctuation_and_spaces_do_not_count_and_numbers_do() -> None:
    index = index_of(["Find $x$, if $x+1 = 3$ holds!"], 4)
    (overlap,) = index.overlaps("we FIND x:  if \n x + 1 is 3")
    assert (overlap.suite, overlap.problem, overlap.runs, overlap.words) == ("suite", "q0", 2, "find x if x")
    assert not index.overlaps("what if x 2 3 holds")
    assert words_of("\\frac{1}{2} Ångström ﬁve") == ["frac", "1", "2", "ångström", "five"]


def test_a_short_problem_overlaps_only_with_the_same_whole() -> None:
    index = index_of(["What is 2+3?"], 13)
    assert [overlap.words for overlap in index.overlaps("what is 2 + 3")] == ["what is 2 3"]
    assert not index.overlaps("what is 2 + 3 + 4"), "a part of it is not the problem"
    assert not index.overlaps("")


def test_prompts_are_not_compared() -> None:
    assert not index_of(["one two three four"], 3).overlaps("a prompt of words")


def test_a_text_without_words_overlaps_with_another_such_one_only() -> None:
    assert not index_of(["one two three"], 3).overlaps("?!")
