"""The labelled corpus keeps its rules, and no verdict on it changes unseen.

It holds more responses of more kinds than the tests of single verifiers, which say why each rule is as it is: a change
of a verifier shows here how many others it moves.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import second_labels
import verifier_corpus as corpus
import verifier_report
from verifier_report import RECORD, changes
from verifier_tables import PAGE, Recorded, agreement, on_page, read_graders, tables

from megasharp.common.errors import UserError
from megasharp.tasks import environment

ITEMS = corpus.read_corpus()
SLOW = [item for item in ITEMS if item.task == "code" or item.today == "timeout"]
# Environments judge their own episodes, and `tools` hands responses to another task's verifier.
JUDGED = {name for name, row in corpus.TASKS.items() if row.verify is not environment.verify} - {"tools"}
FAST = [item for item in ITEMS if item not in SLOW]


def test_the_files_keep_the_rules_of_the_corpus() -> None:
    named = [(path.name, corpus.read_file(path)) for path in corpus.files()]
    assert [*corpus.faults(named)] == []
    assert len(ITEMS) >= 1200 and {item.task for item in ITEMS} == JUDGED - {"countdown_3"}


def test_lines_stand_as_the_tools_write_them() -> None:
    """Recording then changes the verdicts in a diff and nothing else."""
    for path in corpus.files():
        text = path.read_text(encoding="utf-8")
        assert text == "".join(f"{corpus.line_of(item)}\n" for item in corpus.read_file(path)), path.name


def assert_recorded(items: list[corpus.CorpusItem]) -> None:
    changed = [*changes(items, corpus.judged(items))]
    assert not changed, "\n".join(
        ["verdicts that are not the recorded ones; where that is meant, record them:", f"  {RECORD}", *changed]
    )


@pytest.mark.costly("a verdict on every item but programs, most of the time in math-verify's parser")
def test_verdicts_are_the_recorded_ones() -> None:
    assert_recorded(FAST)


@pytest.mark.long("sandbox")
def test_verdicts_that_take_seconds_are_the_recorded_ones() -> None:
    """Programs; what ran into the report's limit of time may end now, or not."""
    assert_recorded([item for item in SLOW if item.today != "timeout"])


def test_a_changed_verdict_is_named() -> None:
    """The line has what a reader needs to judge the change; without one, the tests above would pass on anything."""
    item = replace(next(item for item in ITEMS if item.task == "choice" and item.right), today="wrong")
    [line] = changes([item], corpus.judged([item]))
    assert line.startswith(f"{item.id} ({item.category}): wrong -> correct, right now: {item.reason}")


def test_an_item_without_a_label_is_refused(tmp_path: Path) -> None:
    item = replace(ITEMS[0], wanted=None)
    corpus.write_file(tmp_path / f"{item.task}.jsonl", [item])
    with pytest.raises(UserError, match=f"jsonl:1: {item.id}: wanted is null: read the response"):
        corpus.read_corpus(tmp_path)


def test_repeated_ideas_are_found() -> None:
    """Four responses that differ in digits, the answer and spaces alone are one idea four times."""
    first = next(item for item in ITEMS if item.task == "math")
    alike = [
        replace(
            first,
            id=f"math-{n}",
            template="abcdefghi"[n % 9],
            row={"answer": str(n)},
            response=f"It is  \\boxed{{{n}}}",
            wanted=label,
        )
        for n, label in zip((5, 61, 712, 8), (*corpus.WANTED, *corpus.WANTED), strict=True)
    ]
    found = [*corpus.faults([("math.jsonl", alike)])]
    assert any("masked response" in line and "4 times" in line for line in found)
    assert not any("template" in line or "id " in line for line in found)


def varied(words: list[str], text: str) -> list[corpus.CorpusItem]:
    first = next(item for item in ITEMS if item.task == "math")
    return [
        replace(first, id=f"math-{n}", template=f"{word}-idea", reason=word, response=text.format(word))
        for n, word in enumerate(words)
    ]


WORDS = ["but", "never", "hardly", "also", "even", "rather", "just", "maybe", "surely", "and"]


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 31, {} 32.",
        "{}: \\boxed{{31}}\n\nI give up!",
        "Adding all the numbers of the {0} list, we get 31 in the end, {0} that is what was asked.",
    ],
)
def test_sentences_that_differ_by_a_word_are_found(text: str) -> None:
    """Ten copies with a word of their own are one template ten times, whatever their templates are called."""
    alike = varied(WORDS, text)
    ids = ", ".join(item.id for item in alike)
    assert f"10 responses, not 3, are the same but for a word or two: {ids}" in [*corpus.faults([("m", alike)])]
    assert not any("same but" in line for line in corpus.faults([("m", alike[:3])]))


def test_sentences_of_other_words_are_no_copies() -> None:
    four = ["It is 5, not 6.", "Some say 6, wrongly.", "Leave 6 out: we get 5.", "5 it is; 6 would be too large."]
    alike = [replace(item, response=text) for item, text in zip(varied(WORDS[:4], ""), four, strict=True)]
    assert not any("same but" in line for line in corpus.faults([("m", alike)]))


def test_numbered_templates_and_shared_reasons_are_found() -> None:
    items = [replace(item, template=f"idea-{n}", reason="Right.") for n, item in enumerate(ITEMS[:4])]
    found = [*corpus.faults([("m", items)])]
    assert any(line.startswith(f"template '{items[0].task} idea' stands 4 times") for line in found)
    assert any(line.startswith(f"reason '{items[0].task} Right.' stands 4 times") for line in found)


def test_missing_second_labels_are_found() -> None:
    """The test of the files holds each task to its share of 200."""
    unread = [replace(item, second=None) if item.task == "math" else item for item in ITEMS]
    [line] = corpus.faults([("all", unread)])
    assert line.startswith("math: 0 items have a second label; 8")


def test_the_page_has_the_recorded_verdicts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == on_page(page, tables(ITEMS, read_graders())), f"write the tables: {RECORD}"


def test_kappa_is_that_of_cohens_formula() -> None:
    """The usual example: 20, 5, 10 and 15 of 50 pairs agree in 0.7 of cases, by chance in 0.5: (0.7 - 0.5) / 0.5."""
    pairs = [(True, True)] * 20 + [(True, False)] * 5 + [(False, True)] * 10 + [(False, False)] * 15
    same, kappa = agreement(pairs)
    assert same == pytest.approx(0.7) and kappa == pytest.approx(0.4)
    assert agreement([(True, True)] * 3) == (1.0, 1.0)


def test_a_second_reader_sees_no_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each task its share of 250 items, without those that have a second label."""
    unread = [replace(item, second=None) for item in ITEMS]
    monkeypatch.setattr(second_labels, "read_corpus", lambda: unread)
    assert second_labels.write(tmp_path) == 250
    blind = [
        json.loads(line) for path in tmp_path.glob("blind-*.jsonl") for line in path.read_text().split("\n") if line
    ]
    assert len(blind) == 250 and {tuple(each) for each in blind} == {second_labels.SHOWN}
    of_task, chosen = Counter(item.task for item in ITEMS), Counter(each["task"] for each in blind)
    assert all(abs(chosen[task] - 250 * count / len(ITEMS)) < 1 for task, count in of_task.items())
    drawn = {each["id"] for each in blind}
    read = [replace(item, second=item.wanted if item.id in drawn else None) for item in ITEMS]
    monkeypatch.setattr(second_labels, "read_corpus", lambda: [replace(read[0], second=None), *read[1:]])
    assert second_labels.write(tmp_path) == (read[0].id in drawn)


def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> corpus.CorpusItem:
    """Make a corpus of one item, which is wanted correct and has no second label, the one that labels are read into."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    item = replace(ITEMS[0], wanted="correct", second=None)
    corpus.write_file(folder / f"{item.task}.jsonl", [item])
    monkeypatch.setattr(second_labels, "files", lambda: corpus.files(folder))
    return item


def test_second_labels_come_back_to_their_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = copied(tmp_path, monkeypatch)
    (tmp_path / "labels-1.jsonl").write_text(json.dumps({"id": item.id, "wanted": "wrong", "reason": "B"}) + "\n")
    first, last = second_labels.read(tmp_path)
    assert first.startswith(f"{item.id}: correct (") and last == "1 labels, 1 of them other than the first"
    assert corpus.read_corpus(tmp_path / "corpus")[0].second == "wrong"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "ID", "wanted": "Correct", "reason": "B"}', "ID: wanted is 'Correct', not correct or wrong"),
        ('{"id": "ID", "wanted": "wrong"}', "wanted is an object with the texts id, wanted, reason"),
        ("[]", "wanted is an object with the texts id, wanted, reason"),
        ("correct", "not a label: Expecting value"),
        ('{"id": "ID", "wanted": "wrong", "reason": "B"}\n' * 2, "ID has two labels"),
        (
            '{"id": "ID", "wanted": "wrong", "reason": "B"}\n{"id": "math-0000", "wanted": "wrong", "reason": "B"}',
            "labels of items that the corpus does not have: math-0000",
        ),
        (None, "no labels-"),
    ],
)
def test_a_bad_second_label_is_one_line_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str | None, said: str
) -> None:
    item = copied(tmp_path, monkeypatch)
    if line is not None:
        (tmp_path / "labels-1.jsonl").write_text(line.replace("ID", item.id))
    monkeypatch.setattr("sys.argv", ["second_labels.py", "read", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        second_labels.main()
    # sys.exit prints a text and ends with the code 1.
    assert isinstance(ended.value.code, str) and said.replace("ID", item.id) in ended.value.code
    assert "\n" not in ended.value.code and corpus.read_corpus(tmp_path / "corpus")[0].second is None


def test_the_report_ends_in_one_line_on_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no corpus, fields of other types, and verdicts of graders without a sign for each."""

    def refused(argv: list[str]) -> str:
        monkeypatch.setattr("sys.argv", ["verifier_report.py", *argv])
        with pytest.raises(SystemExit) as ended:
            verifier_report.main()
        assert isinstance(ended.value.code, str) and "\n" not in ended.value.code
        return ended.value.code

    monkeypatch.setattr(verifier_report, "read_corpus", lambda: corpus.read_corpus(tmp_path))
    path = tmp_path / "choice.jsonl"
    path.write_bytes(b"\xff\n")
    assert f"{path}: not a file of the corpus" in refused([])
    path.write_text(json.dumps({**json.loads(corpus.line_of(ITEMS[0])), "id": 5}))
    assert f"{path}:1: 5: id is 5, not of type str" in refused([])
    corpus.write_file(path, [item for item in ITEMS if item.task == "choice"][:1])
    assert "--graders /no/python: no such program" in refused(["--graders", "/no/python"])
    for text in (
        "[",
        '{"versions": {"math": {"g": "1"}}, "verdicts": {"math-0001": "++"}}',
        '{"verdicts": {"a-1": "+"}}',
    ):
        (tmp_path / "graders.json").write_text(text)
        with pytest.raises(UserError, match=r"graders\.json: "):
            read_graders(tmp_path)


def test_tables_count_what_is_recorded() -> None:
    right, wrong = (
        next(item for item in ITEMS if item.task == "math" and item.right is each) for each in (True, False)
    )
    items = [replace(right, today="format"), replace(wrong, today="correct"), replace(right, today="correct")]
    text = tables(items, Recorded({"math": {"g": "1"}}, {right.id: "!", wrong.id: "-"}))
    assert "| `math` | 3 | 1 | 1 | 1 | 0 | 0.500 | 0.500 |" in text
    assert "| `g` 1 | 3 | 0 | 2 | 0 | 1 |  | 0.000 | 2 |" in text
