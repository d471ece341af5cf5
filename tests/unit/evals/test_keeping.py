"""The bound on what is kept, shared by an evaluation's folder or a run's evaluations, and lines of progress."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megasharp.evals.keeping import Keeping, expected_bytes
from megasharp.evals.progress import ProgressLines
from megasharp.evals.result import EvalSetting
from megasharp.evals.samples import SuiteCounts
from megasharp.evals.stored_samples import StoredSample, read_samples, samples_info
from tests.unit.evals.rule_engine import suite_of
from tests.unit.evals.stored import sample

SETTING = EvalSetting("dev", "mine", 4, 2, (1,), 1.0, 7, max_tokens=100, identity={"weights": "w"})


def test_all_evaluations_below_a_folder_share_one_bound(tmp_path: Path) -> None:
    """The first has room, the second begins where the bound is reached: it keeps answers, and says so once."""
    said: list[str] = []
    keeping = Keeping(tmp_path, "texts", 2)
    for step, length in ((1, 4_000_000), (2, 10)):
        folder = tmp_path / f"step_{step}"
        store = keeping.open(folder, SETTING, said.append)
        store.add([sample(0, 0, length=length)])
        store.add([sample(0, 1, length=10)])
        store.finish()
    first, second = (list(read_samples(tmp_path / f"step_{step}", "dev")) for step in (1, 2))
    assert first[0].text is not None and [each.text for each in second] == [None, None]
    assert len(said) == 2 and all("no more room within 2 MiB" in line for line in said)
    info = samples_info(tmp_path / "step_1", "dev")
    assert info is not None and info.setting["label"] == "mine" and info.identity == {"weights": "w"}


def test_the_expected_size_is_said_before() -> None:
    assert expected_bytes(10, 1000, "none") == 0
    assert expected_bytes(10, 1000, "answers") < expected_bytes(10, 1000, "texts") < expected_bytes(10, 1000, "tokens")
    line = Keeping(Path(), "texts", 2048).line("dev", 512_000, 8192)
    assert line.startswith(
        "dev: texts of 512,000 samples are kept, at most about 6,342.7 MB (if all have 8,192 tokens)"
    )


def test_lines_of_progress_come_at_shares_and_by_the_minute_and_say_what_the_estimate_rests_on() -> None:
    """Two samples of each of 100 problems, one a second: the second ones, which end later, are three times as long."""
    now, said = [0.0], list[str]()
    counts = SuiteCounts(suite_of(100).items, 2, greedy=False)
    lines = ProgressLines("dev", counts, said.append, lambda: now[0])
    for index in (0, 1):
        for number in range(100):
            now[0] += 1.0
            counts.add(_of_length(number, index, 10 + 20 * index))
            lines.update()
    seconds = [each.split(" samples")[0].split(" problems, ")[1] for each in said]
    # No line within five seconds of the start or of another; none at the end.
    assert seconds[:3] == ["5 of 200", "10 of 200", "20 of 200"] and seconds[-1] == "180 of 200"
    assert said[1] == (
        "dev: 0 of 100 problems, 10 of 200 samples (5 %), 10 tokens/s, 3:10 left at the mean length of the samples so "
        "far, short ones first (10 tokens)"
    )
    # 20 samples of 20 tokens on average are left, at (100 x 10 + 80 x 30) / 180 tokens a second.
    assert said[-1] == (
        "dev: 80 of 100 problems, 180 of 200 samples (90 %), 19 tokens/s, 0:22 left at the mean length of complete "
        "problems (20 tokens)"
    )
    now[0] += 61.0
    lines.update()
    assert len(said) == len(seconds)


def _of_length(number: int, index: int, tokens: int) -> StoredSample:
    return replace(sample(number, index), tokens=tokens)
