"""The prompt stream: every prompt once an epoch, the same order for the same seed, restorable anywhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.sets.load import load_set
from megasharp.tasks.stream import DataCursor, Epochs, PromptStream, TokenizedPrompts, tokenize_prompts
from megasharp.tasks.table import load_items

ANSWER = CountdownAnswer((1, 2), 3)


class CodePoints:
    """A tokenizer with one token per character."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    plain = encode


def items(count: int, longest: int = 0) -> list[TaskItem]:
    return [
        TaskItem(f"p{i}", "countdown", "x" * longest if i == 0 and longest else f"{i:03d}", ANSWER, "t.jsonl")
        for i in range(count)
    ]


def tokenized(count: int = 10, limit: int = 8, longest: int = 0) -> TokenizedPrompts:
    return tokenize_prompts(items(count, longest), CodePoints(), limit)


def stream(count: int = 10, seed: int = 1, limit: int = 8, longest: int = 0) -> PromptStream:
    return PromptStream(tokenized(count, limit, longest), seed)


def test_its_digest_tells_other_problems_answers_and_orders() -> None:
    some = items(10)
    digests = {
        tokenize_prompts(changed, CodePoints(), 8).digest
        for changed in (
            some,
            [*some[1:], some[0]],
            some[:9],
            [replace(some[0], answer=CountdownAnswer((1, 2), 4)), *some[1:]],
            [replace(some[0], text="other"), *some[1:]],
        )
    }
    assert len(digests) == 5 and tokenized().digest in digests
    assert tokenize_prompts(some, CodePoints(), 3).digest == tokenized().digest, (
        "what is left out says nothing of the file"
    )


def test_two_streams_of_the_same_prompts_do_not_move_each_other() -> None:
    prompts = tokenized()
    first = PromptStream(prompts, 1)
    taken = first.take(7)
    assert PromptStream(prompts, 1).take(7) == taken


def test_every_epoch_hands_out_every_prompt_once_in_its_own_order() -> None:
    taken = stream().take(30)
    epochs = [[p.id for p in taken if p.epoch == epoch] for epoch in range(3)]
    assert [Counter(ids) for ids in epochs] == [Counter(f"p{i}" for i in range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != [f"p{i}" for i in range(10)]
    assert [(p.epoch, p.position) for p in taken] == [(e, p) for e in range(3) for p in range(10)]


def test_prompts_carry_their_item() -> None:
    prompt = stream().take(1)[0]
    assert prompt.tokens == tuple(map(ord, prompt.text))
    assert (prompt.task, prompt.answer, prompt.source) == ("countdown", ANSWER, "t.jsonl")
    assert prompt.text == f"{int(prompt.id[1:]):03d}"


def test_the_seed_alone_decides_and_the_size_of_takes_does_not_matter() -> None:
    whole = stream().take(25)
    other = stream()
    assert whole == [prompt for size in (1, 7, 12, 5) for prompt in other.take(size)]
    assert whole != stream(seed=2).take(25)
    assert stream().take(0) == []


def test_the_order_of_a_seed_never_changes() -> None:
    """A resumed run under another Python must see the same prompts: the order is fixed here."""
    assert [p.id for p in stream(5, seed=7).take(10)] == FIXED_ORDER


FIXED_ORDER = ["p3", "p0", "p4", "p2", "p1", "p3", "p1", "p0", "p2", "p4"]


@each_case("before", [0, 1, 9, 10, 11, 20, 37])
def test_restore_continues_exactly(before: int) -> None:
    first = stream()
    first.take(before)
    assert first.cursor == DataCursor(before // 10, before % 10)
    expected = first.take(13)
    second = stream()
    second.take(4)
    second.restore(DataCursor(before // 10, before % 10))
    assert second.take(13) == expected
    assert second.cursor == first.cursor


@each_case("cursor", [DataCursor(0, 10), DataCursor(2, -1), DataCursor(-1, 0)])
def test_a_cursor_of_other_data_is_refused(cursor: DataCursor) -> None:
    with pytest.raises(UserError, match="cannot resume at prompt"):
        stream().restore(cursor)


def test_long_prompts_are_left_out_and_counted() -> None:
    shorter = tokenized(longest=9)
    assert (shorter.skipped, len(shorter)) == (1, 9)
    assert "p0" not in {prompt.id for prompt in PromptStream(shorter, 1).take(18)}
    assert (tokenized(longest=8).skipped, len(tokenized(longest=8))) == (0, 10)
    assert "p0" in {prompt.id for prompt in stream(longest=8).take(10)}


def test_empty_prompts_are_left_out_and_counted() -> None:
    some = items(4)
    some[2] = TaskItem("empty", "countdown", "", ANSWER, "t.jsonl")
    without = tokenize_prompts(some, CodePoints(), 8)
    assert (len(without), without.skipped) == (3, 1)
    assert "empty" not in {prompt.id for prompt in PromptStream(without, 1).take(3)}


def test_no_prompt_left_is_the_users_to_mend() -> None:
    with pytest.raises(UserError, match=r"data\.max_prompt_tokens: all 10 prompts of t\.jsonl .* shortest has 3"):
        stream(limit=2)
    with pytest.raises(UserError, match="holds no problems"):
        stream(count=0)


def test_the_task_table(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"id": "a", "numbers": [1, 2], "target": 3}\n')
    assert load_items("countdown", path) == [TaskItem("a", "countdown", "1 2=3:", ANSWER, "train.jsonl")]
    with pytest.raises(UserError, match="unknown task 'poker'; known tasks: choice, code, countdown, "):
        load_items("poker", path)
    with pytest.raises(UserError, match=r"unknown task 'count_down'; is it countdown or .*Known tasks: choice, code"):
        load_items("count_down", path)


def test_prompts_that_nothing_trained_on_come_first_again() -> None:
    whole = stream().take(25)
    places = [DataCursor(prompt.epoch, prompt.position) for prompt in whole]
    resumed = stream()
    resumed.restore(places[21], [places[8], places[19]])
    assert resumed.pending == (places[8], places[19])
    assert resumed.take(1) == [whole[8]]
    assert (resumed.pending, resumed.cursor) == ((places[19],), places[21])
    assert resumed.take(4) == [whole[19], *whole[21:24]]
    assert resumed.pending == ()


def test_pending_prompts_that_the_data_does_not_have_are_refused() -> None:
    with pytest.raises(UserError, match="cannot resume at prompt 10 of epoch 0"):
        stream().restore(DataCursor(1, 0), [DataCursor(0, 10)])


def test_an_epoch_is_shuffled_once_for_all_its_pending_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stream().take(23)
    resumed = stream()
    shuffles: list[int] = []
    shuffled = Epochs._shuffled

    def counted(self: Epochs, epoch: int) -> list[int]:
        shuffles.append(epoch)
        return shuffled(self, epoch)

    monkeypatch.setattr(Epochs, "_shuffled", counted)
    resumed.restore(DataCursor(2, 3), [DataCursor(prompt.epoch, prompt.position) for prompt in whole])
    assert resumed.take(23) == whole
    assert shuffles == [2, 0, 1]


@each_case("seed", range(12))
def test_a_resume_anywhere_goes_on_with_the_very_same_prompts(seed: int) -> None:
    """Any size, any place, also in the middle of an epoch, in any number of attempts of any length."""
    rng = Random(seed)
    size, wanted = rng.randint(1, 40), rng.randint(1, 150)
    whole = [(p.id, p.epoch, p.position) for p in stream(size, seed).take(wanted)]
    taken: list[tuple[str, int, int]] = []
    cursor = DataCursor(0, 0)
    while len(taken) < wanted:
        attempt = stream(size, seed)
        attempt.restore(cursor)
        for _ in range(rng.randint(1, 4)):
            count = min(rng.randint(1, 20), wanted - len(taken))
            taken += [(p.id, p.epoch, p.position) for p in attempt.take(count)]
        cursor = attempt.cursor
    assert taken == whole


def test_the_order_does_not_depend_on_how_many_files_hold_the_rows(tmp_path: Path) -> None:
    rows = [f'{{"nums": [{n}, 2, 3], "target": {n + 5}}}\n' for n in range(1, 41)]
    orders = set()
    for files in (1, 3, 12):
        folder = tmp_path / str(files)
        folder.mkdir()
        for number in range(files):
            begin, end = (len(rows) * each // files for each in (number, number + 1))
            (folder / f"train-{number:05}-of-{files:05}.jsonl").write_text("".join(rows[begin:end]))
        loaded = load_set("countdown_3to4", folder).items
        orders.add(tuple(p.id for p in PromptStream(tokenize_prompts(loaded, CodePoints(), 1000), 7).take(100)))
    assert len(orders) == 1
