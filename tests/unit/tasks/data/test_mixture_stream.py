"""The stream of a mixture: shares that hold in every step, epochs of each source, and a resume to the exact prompt."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.shares import Account, Shares
from megasharp.tasks.stream import DataCursor, PromptStream, TokenizedPrompts, tokenize_prompts

ANSWER = CountdownAnswer((1, 2), 3)


class CodePoints:
    """A tokenizer with one token per character."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    plain = encode


def mixed(longest: int = 9, **counts: int) -> TokenizedPrompts:
    items = [
        TaskItem(f"{name}/{number}", "countdown", f"{name}{number}", ANSWER, name)
        for name, count in counts.items()
        for number in range(count)
    ]
    return tokenize_prompts(items, CodePoints(), longest, tuple(counts))


def shares(block: int, **weights: float) -> Shares:
    dealt = Shares([*weights], block)
    dealt.weigh(weights)
    return dealt


@each_case("seed", range(8))
def test_every_step_has_every_share_but_for_one_prompt(seed: int) -> None:
    rng = Random(seed)
    names, block = [f"s{number}" for number in range(rng.randint(2, 7))], rng.choice([3, 48, 256])
    weights = {name: rng.choice([0.0, 1.0, rng.random(), 40_000.0]) for name in names} | {"s0": 1.0}
    dealt, total = shares(block, **weights), sum(weights.values())
    had: Counter[str] = Counter()
    for step in range(1, 41):
        taken = Counter(names[dealt.next()] for _ in range(block))
        had += taken
        for name in names:
            share = weights[name] / total * block
            assert abs(taken[name] - share) < 1.0, (step, name)
            # And nobody stays behind in the long run.
            assert abs(had[name] - share * step) < 1.5, (step, name)


def test_sources_alternate_within_a_step() -> None:
    dealt = shares(8, a=1, b=2, c=1)
    assert [dealt.next() for _ in range(8)] == [1, 0, 2, 1, 1, 0, 2, 1]


def test_other_weights_count_from_the_next_prompt_on_and_leave_no_debt() -> None:
    dealt = shares(8, a=1, b=1)
    dealt.next()
    dealt.weigh({"b": 3.0})
    assert dealt.accounts == [Account(0.0), Account(1.0)]
    assert {dealt.next() for _ in range(20)} == {1}
    before = dealt.accounts
    dealt.weigh({"b": 5.0})
    assert dealt.accounts == before, "only the proportion counts"


def test_each_source_has_epochs_of_its_own() -> None:
    stream = PromptStream(mixed(a=3, b=50), seed=1, block=4, weights={"a": 1.0, "b": 3.0})
    taken = stream.take(24)
    of_a = [prompt.id for prompt in taken if prompt.source == "a"]
    assert len(of_a) == 6 and set(of_a[:3]) == set(of_a[3:]) == {"a/0", "a/1", "a/2"}
    assert Counter(prompt.id for prompt in taken if prompt.source == "b").most_common(1)[0][1] == 1
    # A place names its prompt, whatever source it is of.
    assert {(p.epoch, p.position < 3) for p in taken if p.source == "a"} == {(0, True), (1, True)}
    assert all(prompt.position >= 3 for prompt in taken if prompt.source == "b")


def test_without_weights_a_source_has_the_share_of_its_rows() -> None:
    stream = PromptStream(mixed(a=10, b=30), seed=1, block=8)
    assert Counter(prompt.source for prompt in stream.take(40)) == {"a": 10, "b": 30}
    assert stream.cursor == DataCursor(1, 0) and stream.sources[1].cursor == DataCursor(1, 0)


@each_case("seed", range(8))
def test_a_resume_anywhere_goes_on_with_the_very_same_prompts(seed: int) -> None:
    """Also within a block, with prompts that were taken and not trained, and over a change of weights."""
    rng = Random(seed)
    prompts = mixed(a=rng.randint(1, 9), b=rng.randint(1, 30), c=5)
    block = rng.choice([3, 8])
    stages = [{"a": 1.0, "b": 2.0, "c": 0.3}, {"b": 1.0, "c": 1.0}]

    def begun() -> PromptStream:
        return PromptStream(prompts, seed, block, stages[0])

    undisturbed, stream = begun(), begun()
    for step in range(30):
        weights = stages[step > 14]
        undisturbed.weigh(weights)
        stream.weigh(weights)
        count = rng.randint(1, 5)
        expected = undisturbed.take(count)
        assert stream.take(count) == expected
        if rng.random() < 0.5:
            again = rng.randint(0, count)
            waiting = [DataCursor(p.epoch, p.position) for p in expected[count - again :]]
            resumed = begun()
            resumed.restore(stream.cursor, waiting, stream.sources)
            resumed.weigh(weights)
            assert resumed.pending == tuple(waiting)
            assert resumed.take(again) == expected[count - again :]
            stream = resumed


def test_a_source_that_was_not_there_begins_at_its_first_prompt() -> None:
    before = PromptStream(mixed(a=10, b=10), seed=1, block=2)
    before.take(6)
    after = PromptStream(mixed(a=10, c=10), seed=1, block=2)
    after.restore(before.cursor, [], before.sources)
    assert [state.cursor for state in after.sources] == [DataCursor(0, 3), DataCursor(0, 0)]
    assert [p.source for p in after.take(2)] == ["a", "c"]


def test_a_source_without_a_prompt_that_fits_is_refused() -> None:
    with pytest.raises(UserError, match="all prompts of long are empty or longer than 4 tokens") as refused:
        mixed(longest=4, a=3, long=2)
    assert "\n" not in str(refused.value)
