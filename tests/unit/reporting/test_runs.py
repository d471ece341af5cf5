"""`megasharp runs` on runs in every state: time accounted for, trends, warnings, comparisons."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from run_folders import Folder, steps
from waiting import HANG_S

from megasharp.checkpoint.attempts import AttemptRecord
from megasharp.cli.runs import compare_runs, list_runs
from megasharp.common.control import BestFigure, ControlState, LengthChange, LengthState, Reset, ResetState
from megasharp.common.errors import UserError
from megasharp.reporting.history import find_run, goodput, read_run
from megasharp.reporting.number_text import duration, size
from megasharp.reporting.show import differences, numbered, screen, shared_steps, sparkline, warnings


def printed(part: RenderableType) -> str:
    console = Console(width=150)
    with console.capture() as captured:
        console.print(part)
    return captured.get()


def killed_then_finished(run: Folder) -> Folder:
    """Twelve seconds of attempt 1, killed after step 4, of which the last two are lost; attempt 2 does the rest.

    Step 3's row has the evaluation and the checkpoint that came after step 2.
    """
    rows = steps(1, 10)
    rows[2] |= {"time/step": 5.0, "time/eval": 2.0, "time/checkpoint": 1.0}
    first = AttemptRecord(
        started=100.0, seen=112.0, first_step=1, last_step=4, host="node7",
        seconds={"start": 1.0, "update": 8.0, "eval": 2.0, "checkpoint": 1.0},
    )  # fmt: skip
    second = AttemptRecord(
        started=500.0, seen=520.0, ended=520.0, reason="finished", exit_code=0, from_step=2, first_step=3, last_step=10,
        host="node8", slurm_job_id="17", seconds={"start": 1.0, "update": 16.0, "eval": 2.0, "checkpoint": 0.5},
    )  # fmt: skip
    return run.config().rows(rows).attempt(1, first).attempt(2, second)


def test_goodput_counts_each_step_of_the_history_once(run: Folder) -> None:
    found = goodput(read_run(killed_then_finished(run).root))
    assert (found.wall, found.useful) == (32.0, 20.0)
    assert (found.start, found.evaluation, found.checkpoint) == (2.0, 4.0, 1.5)
    # Four steps were trained before the kill and eight after it, ten of them count.
    assert found.repeated == 4.0
    assert found.rest == pytest.approx(0.5)
    assert found.share == 20 / 32 and not found.estimated
    parts = found.useful + found.start + found.evaluation + found.checkpoint + found.repeated + found.rest
    assert parts == pytest.approx(found.wall)


def test_a_run_that_never_restarted_has_repeated_nothing(run: Folder) -> None:
    """Three seconds of stages lie outside its steps, as at its end."""
    record = AttemptRecord(started=100.0, seen=120.0, ended=120.0, seconds={"start": 1.0, "update": 16.0, "log": 1.0})
    found = goodput(read_run(run.config().rows(steps(1, 7)).attempt(1, record).root))
    assert (found.useful, found.repeated, found.rest) == (14.0, 0.0, 5.0)


def with_time_apart(run: Folder) -> Folder:
    """Two seconds a step, five of an evaluation before the first, three and one after the second."""
    first, second, third = ({**row, "time": time} for row, time in zip(steps(1, 3), (107.0, 109.0, 115.0), strict=True))
    before = {"step": 0, "time": 105.0, "time/eval": 5.0}
    after = [{"step": 2, "time": 110.0, "time/checkpoint": 1.0}, {"step": 2, "time": 113.0, "time/eval": 3.0}]
    return run.config().rows([before, first, second, *after, third])


def test_evaluations_and_saves_are_seconds_of_the_step_after_which_they_came(run: Folder) -> None:
    history = read_run(with_time_apart(run).root)
    assert history.stages == {
        0: {"eval": 5.0}, 1: {"update": 2.0}, 2: {"update": 2.0, "checkpoint": 1.0, "eval": 3.0}, 3: {"update": 2.0}
    }  # fmt: skip
    assert [row["time/step"] for row in history.training] == [2.0, 2.0, 2.0]
    # Seven more steps with an evaluation and a save among each three of them.
    page = printed(screen(history))
    assert "3.33 s a step  left if it goes on 0:23" in page


def test_without_a_record_they_are_taken_from_the_rows(run: Folder) -> None:
    found = goodput(read_run(with_time_apart(run).attempt(1, None).root))
    # From when the first step began.
    assert (found.wall, found.useful, found.evaluation, found.checkpoint, found.rest) == (10.0, 6.0, 3.0, 1.0, 0.0)


def test_a_step_that_is_in_the_log_twice_counts_as_it_was_last(run: Folder) -> None:
    run.config().rows([*steps(1, 3, seconds=9.0), *steps(2, 4)])
    history = read_run(run.root)
    assert [row["time/step"] for row in history.training] == [9.0, 2.0, 2.0, 2.0]


def test_a_run_of_an_older_version_is_estimated_from_its_rows(run: Folder) -> None:
    run.config().rows([{**row, "time": 100.0 + 4 * number} for number, row in enumerate(steps(1, 5))]).attempt(1, None)
    found = goodput(read_run(run.root))
    # From two seconds before the first row, which took so long, to the last one.
    assert (found.wall, found.useful, found.estimated) == (18.0, 10.0, True)
    page = printed(screen(read_run(run.root)))
    assert "56% of 0:18" in page and "estimated" in page and "no record" in page


def test_an_attempt_that_lives_goes_on_to_now(run: Folder) -> None:
    run.config().rows([{**row, "time": 101.0} for row in steps(1, 4)])
    run.attempt(1, AttemptRecord(started=100.0, seen=105.0, first_step=1, last_step=4, seconds={"update": 8.0}))
    with (run.root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        history = read_run(run.root, now=lambda: 110.0)
        assert (history.state, goodput(history).wall) == ("running", 10.0)
        page = printed(screen(history))
    assert "running  step 4 of 10, 40%  2 s a step  ETA 0:12" in page
    history = read_run(run.root, now=lambda: 110.0)
    # What it was last seen at cannot make the wall time shorter than its steps are.
    assert (history.state, goodput(history).wall) == ("killed", 8.0)
    assert "left if it goes on 0:12" in printed(screen(history))


def test_a_run_with_a_budget_of_tokens_is_finished_when_they_are_used_up(run: Folder) -> None:
    run.config().rows([{**row, "rollout/tokens": 100.0} for row in steps(1, 4)])
    run.attempt(1, AttemptRecord(started=100.0, seen=105.0, ended=105.0, exit_code=0, reason="finished"))
    with (run.root / "config.yaml").open("a") as config:
        config.write("token_budget: 500\n")
    history = read_run(run.root)
    assert history.state == "stopped: finished"
    page = printed(screen(history))
    assert "step 4 of 10 at most, tokens 400 of 500" in page and "left if it goes on 0:02" in page
    run.rows([{**row, "rollout/tokens": 100.0} for row in steps(1, 5)])
    assert read_run(run.root).state == "finished"


def test_discarded_responses_are_a_line_where_there_are_any(run: Folder) -> None:
    trained = {"responses/trained": 10.0, "responses/trained_tokens": 5000.0}
    run.config().rows([{**row, **trained, "responses/discarded": 0.0} for row in steps(1, 2)])
    assert "discarded  " not in printed(screen(read_run(run.root)))
    thrown = {"responses/discarded": 3.0, "responses/discarded_tokens": 2700.0}
    run.rows([*({**row, **trained} for row in steps(1, 2)), *({**row, **trained, **thrown} for row in steps(3, 4))])
    line = "discarded  6 responses in the last 4 steps: 900 tokens on average, the 40 trained ones 500"
    assert line in printed(screen(read_run(run.root)))


def test_rows_tell_what_the_record_of_a_killed_attempt_missed(run: Folder) -> None:
    run.config().rows([{**row, "time": 100.0 + 2 * (row["step"] or 0)} for row in steps(1, 6)])
    run.attempt(1, AttemptRecord(started=100.0, seen=108.0, first_step=1, last_step=4))
    record = read_run(run.root).attempts[1]
    assert record is not None and (record.last_step, record.seen) == (6, 112.0)
    run.attempt(2, AttemptRecord(started=200.0, seen=200.0))
    first, second = read_run(run.root).attempts.values()
    assert first is not None and first.last_step == 4
    assert second is not None and second.last_step is None


def test_rows_before_the_step_that_an_attempt_began_after_are_not_its_own(run: Folder) -> None:
    """Its command may have been given while the attempt before it wrote its last rows."""
    run.config().rows([{**row, "time": 100.0 + 2 * (row["step"] or 0)} for row in steps(1, 6)])
    run.attempt(1, AttemptRecord(started=105.0, seen=114.0, from_step=5))
    record = read_run(run.root).attempts[1]
    assert record is not None and (record.first_step, record.last_step) == (6, 6)


def test_a_screen_tells_attempts_checkpoints_and_decisions(run: Folder) -> None:
    control = ControlState(
        ResetState(done=(Reset(4, "every 4 steps", ("reference",)),)),
        LengthState(1, changes=(LengthChange(2, 64, "step 2 is done"),)),
        {"eval/dev/pass@1": BestFigure(0.4, 8)},
    )
    killed_then_finished(run)
    # The newest checkpoint was written before the last evaluation.
    evaluations = [
        {"step": step, "eval/dev/pass@1": value} for step, value in ((0, 0.9), (2, 0.3), (8, 0.4), (10, 0.5))
    ]
    run.rows([*steps(1, 10), *evaluations])
    for step in (2, 4, 6, 8, 10):
        run.checkpoint(step, control)
    (run.root / "checkpoints" / "step_000008" / "weights").unlink()
    (run.root / "checkpoints" / "step_000006" / "manifest.json").write_text("{")
    page = printed(screen(read_run(run.root)))
    assert "finished  step 10 of 10, 100%" in page and "1 restart\n" in page
    lines = {tuple(line.split()) for line in page.splitlines()}
    assert any(line[:1] == ("1",) and line[3:] == ("node7", "1", "to", "4", "0:12", "killed") for line in lines)
    assert any(line[3:] == ("node8", "job", "17", "3", "to", "10", "0:20", "finished") for line in lines)
    assert any(line[:2] == ("step", "10") and line[4:] == ("2", "KB", "complete,", "the", "best") for line in lines)
    assert "step 8" in page and "weights is missing or has another size" in page
    assert "its manifest is damaged" in page
    assert "step 4 " not in page.replace("after step 4 ", "")
    assert "resets  after step 4 (every 4 steps)" in page
    assert "response limits  64 after step 2 (step 2 is done)" in page
    assert "! checkpoint of step 8: weights is missing" in page


def test_a_run_that_has_only_begun_and_one_without_evaluations_are_shown(run: Folder) -> None:
    run.config()
    page = printed(screen(read_run(run.root)))
    assert "never trained a step  step 0 of 10, 0%" in page and "no metrics yet" in page and "goodput" not in page
    run.rows(steps(1, 3))
    page = printed(screen(read_run(run.root)))
    assert "reward" in page and "0.010" in page and "0.030 at 3" in page and "pass@" not in page


def test_a_torn_last_line_and_nulls_do_not_disturb(run: Folder) -> None:
    run.config().rows([*steps(1, 2), {"step": 3, "reward/mean": None, "time/step": 2.0}])
    with (run.root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rewa')
    history = read_run(run.root)
    assert history.last_step == 3 and history.series("reward/mean") == [(1, 0.01), (2, 0.02)]


def evaluations(*values: tuple[int, float, float]) -> list[dict[str, float | None]]:
    return [{"step": step, "eval/dev/pass@1": one, "eval/dev/pass@64": many} for step, one, many in values]


def test_collapse_is_told_where_it_is(run: Folder) -> None:
    rising = evaluations((0, 0.13, 0.9), (5, 0.3, 0.78))
    (line,) = warnings(read_run(run.config().rows(rising).root))
    assert line.startswith("dev: pass@64 falls (0.900 to 0.780) while pass@1 rises (0.130 to 0.300): the policy")
    for healthy in (
        evaluations((0, 0.13, 0.9), (5, 0.3, 0.91)),
        evaluations((0, 0.13, 0.9), (5, 0.14, 0.78)),
        evaluations((0, 0.13, 0.9)),
    ):
        assert warnings(read_run(run.rows(healthy).root)) == []


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"policy/skipped": 1.0}, "100% of the last updates were left out"),
        ({"rollout/truncated": 0.4}, "40% of the last responses met the length limit"),
        ({"group/zero_advantage": 0.9}, "90% of the last groups teach nothing"),
    ],
)
def test_steps_that_teach_little_are_told(run: Folder, figures: dict[str, float], words: str) -> None:
    (line,) = warnings(read_run(run.config().rows(steps(1, 3, **figures)).root))
    assert line.startswith(words)
    assert warnings(read_run(run.rows(steps(1, 3, **dict.fromkeys(figures, 0.0))).root)) == []


def test_a_reward_that_fails_is_the_cause_to_name(run: Folder) -> None:
    rows = [*steps(1, 60), *steps(61, 61, **{"reward/errors": 1.0, "group/zero_advantage": 1.0, "policy/skipped": 1.0})]
    (line,) = warnings(read_run(run.config().rows(rows).root))
    assert line.startswith("100% of the last rewards failed, as logs/attempt_*/verifiers.log says")


def test_entropy_that_is_gone_is_told(run: Folder) -> None:
    rows = [{"step": step, "entropy/policy": value} for step, value in ((1, 1.0), (2, 0.09))]
    assert "less than a tenth" in warnings(read_run(run.config().rows(rows).root))[0]


def test_attempts_without_progress_are_told(run: Folder) -> None:
    run.config().rows(steps(1, 3))
    for number in (1, 2):
        run.attempt(number, AttemptRecord(started=1.0, seen=2.0, ended=2.0, reason="no GPU", exit_code=1))
    assert "the last two attempts finished no step" in warnings(read_run(run.root))
    assert "stopped: no GPU" in printed(screen(read_run(run.root)))


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ({}, "killed"),
        ({"ended": 2.0, "reason": "no space left", "exit_code": 2}, "stopped: no space left"),
        ({"ended": 2.0, "reason": "finished", "exit_code": 0}, "finished"),
    ],
)
def test_a_run_that_ended_between_its_last_step_and_its_end_is_not_finished(
    run: Folder, end: dict[str, object], state: str
) -> None:
    """The last step's row is written before its checkpoint and the evaluation at the end."""
    run.config().rows(steps(1, 10)).attempt(1, AttemptRecord.model_validate({"started": 1.0, "seen": 2.0, **end}))
    history = read_run(run.root)
    assert history.state == state
    assert any("killed" in line for line in warnings(history)) == (state == "killed")


def test_where_there_are_no_locks_no_run_is_going_on(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.config().rows(steps(1, 3)).root.joinpath(".lock").touch()

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert read_run(run.root).state == "not running"


WORDS = "[/third_party/gloo/pair.cc:538] [errno 28] No space :boom: [red]closed"


def test_no_word_of_a_run_is_read_as_markup(tmp_path: Path) -> None:
    """One run of that kind would otherwise hide all of a list."""
    failed = AttemptRecord(started=1.0, seen=2.0, ended=2.0, reason=WORDS, exit_code=1, host=WORDS)
    for name in ("one", "other"):
        odd = Folder(tmp_path / name).config(f"'{name} {WORDS}'", steps=10 + len(name))
        odd.rows([*steps(1, 3), {"step": 3, f"eval/{WORDS}/pass@1": 0.1}]).attempt(1, failed)
    console = Console(width=600)
    for print_it, words in (
        (
            lambda: console.print(screen(read_run(find_run("one", tmp_path)))),
            ["  {} ", "{} (exit 1)", "{} pass@1", "stopped: {}"],
        ),
        (lambda: list_runs(tmp_path, console), ["one {}", "stopped: {}"]),
        (
            lambda: compare_runs(["one", "other"], tmp_path, None, console),
            ["one {}", "eval/{}/pass@1", "3 of 13, stopped: {}"],
        ),
    ):
        with console.capture() as captured:
            print_it()
        page = captured.get()
        assert [text for text in words if text.format(WORDS) not in page] == []


def test_a_long_reason_is_bounded_in_lists_and_whole_on_the_screen(tmp_path: Path) -> None:
    reason = "a rank is gone; " + "its log ends with many words, " * 15 + "the last of which is this"
    failed = AttemptRecord(started=1.0, seen=2.0, ended=2.0, reason=reason, exit_code=1)
    Folder(tmp_path / "one").config("one").rows(steps(1, 3)).attempt(1, failed)
    Folder(tmp_path / "two").config("two").rows(steps(1, 3))
    console = Console(width=80)
    with console.capture() as captured:
        list_runs(tmp_path, console)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) < 180 and any("stopped: a rank is gone; its log ends" in line for line in lines)
    assert any("..." in line for line in lines)
    assert f"stopped: {reason}" in " ".join(printed(screen(read_run(tmp_path / "one"))).split())


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 40) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([2.0] * 3, 40) == "▄▄▄"
    assert sparkline([], 40) == "" and len(sparkline(list(range(1001)), 40)) == 40


def test_durations_and_sizes() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]
    assert [size(b) for b in (5, 12_400_000, 1.2e12)] == ["5 B", "12.4 MB", "1.2 TB"]


def two_runs(folder: Path) -> list[Folder]:
    found = [Folder(folder / name).config(name, steps=9, lr=lr) for name, lr in (("a", 0.1), ("b", 0.2))]
    for number, one in enumerate(found):
        evaluated = [{**row, "step": row["step"]} for row in evaluations((0, 0.1, 0.8), (4, 0.2 + number / 10, 0.7))]
        one.rows([*steps(1, 5 + number), *evaluated])
    return found


def test_runs_are_compared_by_keys_equal_steps_and_ends(tmp_path: Path) -> None:
    first, second = two_runs(tmp_path)
    assert differences([read_run(first.root), read_run(second.root)]) == {"policy.optimizer.lr": ["0.1", "0.2"]}
    console = Console(width=150)
    with console.capture() as captured:
        picture = compare_runs(["a", "b"], tmp_path, None, console)
    page = captured.get()
    lines = [line.split() for line in page.splitlines()]
    assert ["policy.optimizer.lr", "0.1", "0.2"] in lines
    assert ["step", "4", "0.200", "0.300"] in lines
    assert ["at", "the", "end", "0.050", "(step", "5)", "0.060", "(step", "6)"] in lines
    assert picture == tmp_path / "compare.png" and picture.read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_name_have_columns_of_their_own_and_the_picture_lies_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tries of one file in two folders: `runs` of the folder where somebody stands is none of theirs."""
    first, second = (Folder(tmp_path / try_ / "tiny").config("tiny", lr=lr) for try_, lr in (("x", 0.1), ("y", 0.2)))
    for one in (first, second):
        one.rows(steps(1, 3))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    console = Console(width=400)
    with console.capture() as captured:
        picture = compare_runs(["../x/tiny", "../y/tiny"], Path("runs"), None, console)
    headed = [line.split()[-2:] for line in captured.get().splitlines() if line.startswith(("key", "cost", "reward"))]
    assert headed == [["../x/tiny", "../y/tiny"]] * 3
    assert picture == tmp_path / "x" / "compare.png" and picture.exists()
    assert not any((tmp_path / "here").iterdir())
    with pytest.raises(UserError, match="named twice"):
        compare_runs(["../x/tiny", str(first.root)], Path("runs"), None, console)


def test_tables_in_a_list_are_compared_key_by_key() -> None:
    tree = {"data": {"stages": [{"until": 3, "above": {"value": 0.1}}, {"until": 5}], "none": []}}
    expected = {
        "data.stages[0].until": 3,
        "data.stages[0].above.value": 0.1,
        "data.stages[1].until": 5,
        "data.none": [],
    }
    assert dict(numbered(tree)) == expected


def test_equal_steps_are_those_all_runs_have() -> None:
    assert shared_steps([{1: 0.0, 2: 0.0, 5: 0.0}, {2: 0.0, 5: 0.0, 9: 0.0}]) == [2, 5]
    assert shared_steps([dict.fromkeys(range(100), 0.0)]) == [0, 33, 66, 99]
    assert shared_steps([{}, {1: 0.0}]) == []


def test_runs_are_found_by_path_and_by_name_and_listed(tmp_path: Path) -> None:
    first, _ = two_runs(tmp_path)
    (tmp_path / "thesis").mkdir()
    assert find_run("a", tmp_path) == find_run(str(first.root), Path("elsewhere")) == tmp_path / "a"
    with pytest.raises(UserError, match="no run 'c': neither c nor"):
        find_run("c", tmp_path)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.yaml").write_text("[]")
    console = Console(width=150)
    with console.capture() as captured:
        list_runs(tmp_path, console)
        console.print(screen(read_run(find_run("a", tmp_path))))
    page = " ".join(captured.get().split())
    assert f"! {tmp_path}/torn/config.yaml: not a run's configuration" in page
    assert "5 of 9" in page and "6 of 9" in page and "thesis" not in page
    for names, message in ((["a"], "at least two"), (["a", str(first.root)], "named twice")):
        with pytest.raises(UserError, match=message):
            compare_runs(names, tmp_path, None, console)


@pytest.mark.parametrize("command", ("show a", "list ."))
def test_a_screen_waits_for_no_torch_and_no_matplotlib(tmp_path: Path, command: str) -> None:
    two_runs(tmp_path)
    script = (
        "import sys\nfrom megasharp.cli.main import app\n"
        f"app({['runs', *command.split()]!r}, standalone_mode=False)\n"
        "print({'torch', 'matplotlib', 'numpy'} & sys.modules.keys())"
    )
    (tmp_path / "runs").symlink_to(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert done.stdout.splitlines()[-1] == "set()" and len(done.stdout.splitlines()) > 2


def test_a_long_reason_does_not_fill_the_screen(run: Folder) -> None:
    words = "no engine is left: " + "line of a log " * 100
    run.config().rows(steps(1, 2)).attempt(
        1, AttemptRecord(started=1.0, seen=9.0, ended=9.0, reason=words, exit_code=1)
    )
    page = printed(screen(read_run(run.root)))
    assert "no engine" in page and "..." in page and page.count("line of") < 75
