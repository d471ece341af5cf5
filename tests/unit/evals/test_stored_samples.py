"""The store of an evaluation's samples: order, kills in the middle of a write, what is kept, other evaluations."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megasharp.common.errors import UserError
from megasharp.common.formats import Keep
from megasharp.common.records import TurnText
from megasharp.evals import sample_store, stored_samples
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.stored_samples import (
    SamplesInfo,
    StoredSample,
    journals,
    parts,
    read_chosen,
    read_columns,
    read_samples,
    samples_info,
    stored_seconds,
    suites_with_samples,
)
from tests.unit.evals.stored import sample

INFO = SamplesInfo("dev.1", {"n": 4, "label": "mine"}, {"weights": "w", "n": "4"}, "tokens")


def some(problems: int = 5, n: int = 4) -> list[StoredSample]:
    """In the order in which they are read."""
    return [
        sample(number, index, greedy) for number in range(problems) for greedy in (True, False) for index in range(n)
        if not (greedy and index)
    ]  # fmt: skip


def committed(store: SampleStore, samples: Sequence[StoredSample]) -> None:
    for start in range(0, len(samples), 3):
        store.add(samples[start : start + 3], 0.5)


def read(folder: Path) -> list[StoredSample]:
    return list(read_samples(folder, "dev.1"))


def test_samples_come_back_in_order_whatever_order_they_came_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From many parts and a journal, while it runs and after; beside another suite whose name begins alike."""
    monkeypatch.setattr(sample_store, "PART_BYTES", 4000)
    monkeypatch.setattr(sample_store, "GROUP_BYTES", 500)
    wanted = some()
    mixed = random.Random(4).sample(wanted, len(wanted))
    store = SampleStore(tmp_path, INFO)
    committed(store, mixed)
    SampleStore(tmp_path, replace(INFO, suite="dev")).add(wanted[:1])
    assert len(parts(tmp_path, "dev.1")) > 1 and len(journals(tmp_path, "dev.1")) == 1
    assert read(tmp_path) == wanted
    chosen = wanted[::3]
    assert list(read_chosen(tmp_path, "dev.1", {each.key for each in chosen})) == chosen
    short = read_columns(tmp_path, "dev.1", ["seed", "outcome"])
    assert short.to_pylist() == [{"seed": each.seed, "outcome": str(each.outcome)} for each in wanted]
    store.finish()
    assert journals(tmp_path, "dev.1") == [] and read(tmp_path) == wanted
    bare = [replace(each, text=None, token_ids=None) for each in wanted]
    assert list(read_samples(tmp_path, "dev.1", texts=False)) == bare
    assert samples_info(tmp_path, "dev.1") == INFO
    assert suites_with_samples(tmp_path) == ["dev", "dev.1"]
    assert stored_seconds(tmp_path, "dev.1") == 0.5 * 9
    assert list(read_samples(tmp_path, "other")) == [] == list(read_chosen(tmp_path, "other", {(0, True, 0)}))
    assert read_columns(tmp_path, "other", ["seed"]).num_rows == 0 and samples_info(tmp_path, "other") is None


def test_a_torn_tail_is_dropped_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    """Cut at every 797th byte: exactly the commits that were whole are read, and the next attempt takes them over."""
    store = SampleStore(tmp_path / "whole", INFO)
    ends, wanted = [], some(2)
    (tmp_path / "whole" / "samples").mkdir(parents=True)
    for start in range(0, len(wanted), 3):
        store.add(wanted[start : start + 3], 0.5)
        (journal,) = journals(tmp_path / "whole", "dev.1")
        ends.append(journal.stat().st_size)
    content = journal.read_bytes()
    for cut in [*range(0, len(content), 797), len(content), *ends]:
        at = tmp_path / f"cut_{cut}"
        (at / "samples").mkdir(parents=True, exist_ok=True)
        (at / "samples" / journal.name).write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends)
        assert read(at) == wanted[: 3 * whole]
        later = SampleStore(at, INFO)
        later.add(wanted[3 * whole :] or wanted[:1])
        assert [path.name for path in journals(at, "dev.1")] == ["dev.1.2.arrows"]
        assert read(at) == wanted
        assert stored_seconds(at, "dev.1") == 0.5 * whole
        later.close()
        shutil.rmtree(at)


def test_damage_within_a_journal_ends_it_before_the_commit(tmp_path: Path) -> None:
    """Bytes of a figure that a disk lost: Arrow's own checks see lengths and offsets alone."""
    store, wanted = SampleStore(tmp_path, INFO), some(2)
    store.add(wanted[:3])
    (journal,) = journals(tmp_path, "dev.1")
    first = journal.stat().st_size
    store.add(wanted[3:6])
    store.close()
    content, found = journal.read_bytes(), []
    for place in range(first, len(content), 97):
        wrong = bytes(each ^ 0xFF for each in content[place : place + 8])
        journal.write_bytes(content[:place] + wrong + content[place + 8 :])
        found.append(read(tmp_path))
    # Between columns there is padding.
    assert all(each in (wanted[:3], wanted[:6]) for each in found) and found.count(wanted[:3]) > len(found) / 2


def test_what_a_part_and_a_journal_both_have_is_one_sample(tmp_path: Path) -> None:
    """A kill between a part's rename and its journal's end; and one between a taken-over journal and the old one."""
    wanted = some()
    store = SampleStore(tmp_path, INFO)
    committed(store, wanted)
    (journal,) = journals(tmp_path, "dev.1")
    content = journal.read_bytes()
    store.finish()
    journal.write_bytes(content)
    journal.with_name("dev.1.2.arrows").write_bytes(content)
    assert read(tmp_path) == wanted
    again = SampleStore(tmp_path, INFO)
    again.finish()
    assert journals(tmp_path, "dev.1") == [] and read(tmp_path) == wanted


@pytest.mark.parametrize("kept", ["none", "answers", "texts", "tokens"])
def test_what_is_kept(tmp_path: Path, kept: Keep) -> None:
    """Changing it loses nothing that is there."""
    first = SampleStore(tmp_path, INFO)
    first.add(some(1))
    first.close()
    store = SampleStore(tmp_path, replace(INFO, kept=kept))
    store.add(some(2)[5:])
    assert [(each.text is None, each.token_ids is None) for each in read(tmp_path)] == [(False, False)] * 5 + [
        (kept in ("none", "answers"), kept != "tokens")
    ] * 5
    store.finish()
    assert len(read(tmp_path)) == (0 if kept == "none" else 10)
    assert (tmp_path / "samples").exists() == (kept != "none")


def test_texts_end_at_the_bound_and_answers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_store, "_LEAST", 10_000)
    said: list[str] = []
    store = SampleStore(tmp_path, replace(INFO, kept="texts"), room=100_000, full=lambda: said.append("full"))
    for number in range(40):
        store.add([sample(number, 0, length=10_000)])
    store.finish()
    found = read(tmp_path)
    with_text = [each.text is not None for each in found]
    assert len(found) == 40 and with_text == sorted(with_text, reverse=True) and 5 < sum(with_text) < 40
    assert said == ["full"]
    assert sum(path.stat().st_size for path in parts(tmp_path, "dev.1")) < 120_000


def test_other_evaluations_and_damage_are_one_line(tmp_path: Path) -> None:
    store = SampleStore(tmp_path, INFO)
    store.add(some(1))
    store.finish()
    message = r"samples of dev\.1 of another evaluation \(n 4, now 20\); its own settings continue it; for others give"
    with pytest.raises(UserError, match=message):
        SampleStore(tmp_path, replace(INFO, identity={**INFO.identity, "n": "20"}))
    (part,) = parts(tmp_path, "dev.1")
    other = pq.read_table(part)
    said = dict(other.schema.metadata)
    pq.write_table(other.replace_schema_metadata(said | {b"identity": b"{}"}), part.with_name("dev.1-00001.parquet"))
    with pytest.raises(UserError, match=r"00001\.parquet: of another evaluation than the samples beside it"):
        samples_info(tmp_path, "dev.1")
    part.with_name("dev.1-00001.parquet").write_bytes(b"no table")
    with pytest.raises(UserError, match=r"00001\.parquet: cannot be read .* remove it to sample its part again"):
        next(read_samples(tmp_path, "dev.1"))


def test_a_disk_that_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file")
    with pytest.raises(UserError, match=r"samples cannot be written: .*"):
        SampleStore(tmp_path, INFO).add(some(1))


def test_turns_come_back_and_older_files_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that an earlier release has left is taken over."""
    with monkeypatch.context() as before:
        older = stored_samples.columns().remove(stored_samples.columns().get_field_index("turns"))
        before.setattr(stored_samples, "columns", lambda: older)
        before.setattr(sample_store, "fields", lambda of: [each for each in fields(of) if each.name != "turns"])
        store = SampleStore(tmp_path, INFO)
        committed(store, some(2))
        store.close()
    assert read(tmp_path) == some(2)
    turns = (TurnText(0, 2, 4, 0, 3, 5, 0.5), TurnText(4, 6, 6, 5, 9, 9, None))
    later = [replace(one, turns=turns) for one in some()[10:]]
    store = SampleStore(tmp_path, INFO)
    committed(store, later)
    assert read(tmp_path) == [*some(2), *later]
    store.finish()
    assert read(tmp_path) == [*some(2), *later]
    assert [one.turns for one in read_samples(tmp_path, "dev.1", texts=False)][-1] == turns
