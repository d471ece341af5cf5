"""Stored samples on the page: sets and judgements, what is chosen, bounds, and folders that lack something."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from page_runs import EVIL, result
from page_samples import LONG, N, samples, store
from run_folders import Folder

from megasharp.common.records import Outcome
from megasharp.evals.rejudge import find_flips, same_samples
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.stored_samples import SamplesInfo, read_samples, samples_info
from megasharp.reporting.history import read_run
from megasharp.reporting.page import stored
from megasharp.reporting.page.records import StoredSuite
from megasharp.reporting.page.serve import LivePage, as_json, read_page
from megasharp.reporting.page.stored import read_stored

PROBLEMS = 40


def judged(number: int, index: int) -> bool:
    """Problem i is solved by the samples below i modulo 7; by one of two judgements p9's sample 2 is wrong."""
    return index < number % (N + 1)


def mended(number: int, index: int) -> bool:
    return not judged(number, index) if (number, index) in ((9, 2), (20, 0), (20, 5)) else judged(number, index)


@pytest.fixture
def evaluated(run: Folder) -> Path:
    """A run that was evaluated twice, the second evaluation judged twice."""
    run.config()
    for step in (0, 6):
        store(run.root / "evals" / f"step_{step:06d}", samples(PROBLEMS, judged, step), step=step)
    again = run.root / "evals" / "step_000006" / "rejudged"
    store(again, samples(PROBLEMS, mended, 6), keep="answers", judged="again")
    return run.root


def shown(root: Path) -> StoredSuite:
    ((one,), unread) = read_stored([read_run(root)], ["mine"], {})
    assert unread == []
    return one


def test_two_judgements_are_one_set_and_two_steps_are_two(evaluated: Path) -> None:
    """The seeds of both steps are the same. Counts are those of the samples themselves and of `find_flips`."""
    one = shown(evaluated)
    assert [(each.name, each.run, each.step) for each in one.sets] == [("mine 0", 0, 0), ("mine 6", 0, 6)]
    assert [[each.name for each in group.judgements] for group in one.sets] == [
        ["first judgement"],
        ["first judgement", "rejudged"],
    ]
    before, folder = (evaluated / "evals" / f"step_{step:06d}" for step in (0, 6))
    assert not same_samples(samples_info(before, "dev"), samples_info(folder, "dev"))
    first, second = one.sets[1].judgements
    correct = Counter(each.greedy for each in read_samples(folder, "dev") if each.outcome is Outcome.CORRECT)
    assert (first.samples, first.correct, first.greedy, first.greedy_correct) == (
        PROBLEMS * N,
        correct[False],
        PROBLEMS,
        correct[True],
    )
    flips = find_flips(folder, folder / "rejudged", "dev").flips
    gained = sum(flip.after.outcome is Outcome.CORRECT for flip in flips)
    assert (second.gained, second.lost) == (gained, len(flips) - gained) and gained > 0 < second.lost


def test_flips_come_first_then_middle_success_and_each_problem_has_both_verdicts(evaluated: Path) -> None:
    one = shown(evaluated)
    # p20 flips three times, its greedy sample and two others; then problems of 3 in 6.
    assert [each.id for each in one.problems[:3]] == ["p20", "p9", "p3"]
    assert one.problems[0].counts == [[[6, 6]], [[6, 6], [6, 4]]]
    assert len(one.problems) == stored.SHOWN_PROBLEMS < PROBLEMS and f"{PROBLEMS} problems are stored" in one.note
    own = [row for row in one.rows if (row.set, row.problem) == (1, 1)]
    assert own[0].greedy and len(own) == N + 1
    (flipped,) = [row for row in own if row.verdicts[0].outcome != row.verdicts[1].outcome]
    assert (flipped.index, flipped.seed) == (2, str(2**62 + 902))
    assert {row.verdicts[1].outcome for row in own} == {"correct", "wrong"}


def test_texts_keep_their_ends_and_all_of_it_its_bound(evaluated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is at the end of a text; a line of a megabyte takes what any text takes at most."""
    row = next(row for row in shown(evaluated).rows if row.letters == len(LONG))
    assert row.text + row.tail == LONG[: stored.BEGINNING] + LONG[-stored.END :] and row.finish == "length"
    monkeypatch.setattr(stored, "MOST_LETTERS", 20_000)
    few = shown(evaluated)
    assert 0 < len(few.problems) < stored.SHOWN_PROBLEMS
    assert 0 < len(json.dumps([asdict(row) for row in few.rows])) < 2 * 20_000
    assert f"On this page are {len(few.rows)} samples of {len(few.problems)} problems" in few.note


def test_every_step_of_each_run_is_shown(tmp_path: Path) -> None:
    """The longer run's last model too, which the shorter run has no counterpart of."""
    for name, steps in {"long": (0, 5, 10, 15, 20), "short": (0, 10)}.items():
        folder = tmp_path / name
        folder.mkdir()
        Folder(folder).config()
        for step in steps:
            store(folder / "evals" / f"step_{step:06d}", samples(3, judged, step), label=name, step=step)
    ((one,), unread) = read_stored([read_run(tmp_path / name) for name in ("long", "short")], ["long", "short"], {})
    named = [each.name for each in one.sets]
    assert named == [*(f"long {step}" for step in (0, 5, 10, 15, 20)), "short 0", "short 10"] and unread == []
    assert f"dev: {7 * 3 * (N + 1)} samples of 3 problems are stored. On this page" in one.note


def test_evaluations_that_are_left_out_are_counted(run: Folder) -> None:
    """Also one that still runs, whose samples are in a journal; one that cannot be read is reported."""
    run.config()
    evals = run.root / "evals"
    for step in range(9):
        store(evals / f"step_{step:06d}", samples(3, judged, step), step=step)
    running = SampleStore(evals / "step_000003", SamplesInfo("dev", {}, {"weights": "w"}, "texts"))
    running.add([replace(one, number=one.number + 3) for one in samples(2, judged, 3)])
    one = shown(run.root)
    assert [each.step for each in one.sets] == [0, 2, 4, 6, 8]
    assert f"dev: {(9 * 3 + 2) * (N + 1)} samples of 3 problems are stored." in one.note
    assert f"left out: 4, with {(4 * 3 + 2) * (N + 1)} of the samples" in one.note
    (path,) = (evals / "step_000005" / "samples").iterdir()
    path.write_text("torn")
    ((one,), (unread,)) = read_stored([read_run(run.root)], ["mine"], {})
    assert path.name in unread and f"dev: {(8 * 3 + 2) * (N + 1)} samples" in one.note


def test_hostile_texts_stay_data(evaluated: Path) -> None:
    page = read_page([evaluated], live=False)
    text = as_json(page)
    assert "<" not in text and any(
        problem["id"] == f"p1{EVIL}" for problem in json.loads(text)["stored"][0]["problems"]
    )


def test_where_only_answers_were_kept(run: Folder) -> None:
    run.config()
    store(run.root / "evals" / "step_000006", samples(3, judged), keep="answers")
    rows = shown(run.root).rows
    assert {(row.text, row.letters) for row in rows} == {("", -1)} and all(row.verdicts[0].answer for row in rows)


def test_a_judgement_from_elsewhere_finds_the_texts_beside_it(evaluated: Path, tmp_path: Path) -> None:
    """Given by its JSON file; a judgement in a folder of its own joins too, and other samples do not."""
    folder = store(tmp_path / "x", samples(3, judged), label="other")
    store(folder / "rejudged", samples(3, mended), label="other", keep="answers", judged="again")
    store(tmp_path / "own", samples(2, judged), label="other", keep="answers", judged="mine:f")
    moved = [replace(one, seed=one.seed + 1) for one in samples(2, judged)]
    store(tmp_path / "no", moved, label="other", judged="mine:g")
    given = {tmp_path / name / "dev.json": result([0, 0], 8, 9) for name in ("x/rejudged", "own", "no")}
    ((one,), unread) = read_stored([read_run(evaluated)], ["mine"], given)
    names = [[each.name for each in group.judgements] for group in one.sets]
    assert names[2:] == [["first judgement", "rejudged", "own"], ["first judgement"]] and unread == []
    assert {row.letters > 0 for row in one.rows if row.set == 2} == {True}
    assert [judgement.samples for judgement in one.sets[2].judgements] == [3 * N, 3 * N, 2 * N]
    partly = next(row for row in one.rows if row.set == 2 and one.problems[row.problem].id == "p2")
    assert [verdict.outcome for verdict in partly.verdicts][-1] == "not judged"


def test_damaged_samples_are_told_and_the_others_shown(evaluated: Path) -> None:
    (path,) = (evaluated / "evals" / "step_000006" / "rejudged" / "samples").iterdir()
    path.write_text("torn")
    page = read_page([evaluated], live=False)
    assert [len(one.judgements) for one in page.stored[0].sets] == [1, 1]
    assert len(page.unread) == 1 and path.name in page.unread[0]


def test_a_judgement_that_ends_is_news(evaluated: Path) -> None:
    page = LivePage([evaluated], lambda: read_page([evaluated], live=True))
    before, _ = page.newest()
    assert page.newest()[0] == before
    (evaluated / "evals" / "step_000006" / "rejudged" / "dev.json").write_text("{}")
    assert page.newest()[0] != before


def test_questions_and_known_answers_come_from_the_suite(run: Folder, tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text("{task: short_answer, path: sums.jsonl}")
    (tmp_path / "sums.jsonl").write_text('{"id": "p0", "input": "What is 1 + 1?", "target": "2"}\n')
    run.config()
    with (run.root / "config.yaml").open("a") as file:
        file.write(f"eval: {{suites: [{tmp_path / 'sums.yaml'}]}}\n")
    store(run.root / "evals" / "step_000006", samples(2, judged), suite="sums")
    found = {problem.id: (problem.question, problem.known) for problem in shown(run.root).problems}
    assert "What is 1 + 1?" in found["p0"][0] and found["p0"][1] == "2" and found[f"p1{EVIL}"] == ("", "")
