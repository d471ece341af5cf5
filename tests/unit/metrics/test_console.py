"""Progress on a terminal and off it, and the closing tables."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megasharp.metrics.console import Progress, RunSummary, StepLine, SuiteChange, SuiteFigures, print_summary


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, _environ={})


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_come_at_the_ends_every_few_steps_and_when_time_passes():
    out, time = console(terminal=False), [0.0]
    with Progress(20, 1, console=out, plain_every=10, plain_seconds=10.0, now=lambda: time[0]) as progress:
        for step in range(1, 21):
            time[0] += 30.0 if step == 14 else 1.0
            progress.update(StepLine(step, 0.25, 1234.4))
    lines = printed(out).splitlines()
    assert [line.split()[1] for line in lines] == ["1/20", "10/20", "14/20", "20/20"]
    assert lines[0] == "step 1/20  reward 0.250  1,234 tok/s  ETA 0:19"
    assert lines[-1].endswith("ETA 0:00")


def test_a_resumed_run_reckons_with_its_own_steps_only():
    out, time = console(terminal=False), [0.0]
    progress = Progress(5000, 101, console=out, now=lambda: time[0])
    time[0] = 2.0
    progress.update(StepLine(101, 0.5, 10.0))
    assert "step 101/5000" in printed(out)
    assert "ETA 2:43:18" in printed(out)  # 4899 steps of 2 s


def test_the_bar_shows_the_figures():
    out = console(terminal=True)
    with Progress(4, 1, console=out) as progress:
        progress.note("[evaluation] pass@1 0.1")
        progress.update(StepLine(3, 0.125, 999.0))
    text = printed(out)
    assert "3/4" in text
    assert "reward 0.125" in text
    assert "999 tok/s" in text
    assert "[evaluation] pass@1 0.1" in text


def test_colours_that_are_forced_bring_no_bar_into_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(4, 1) as progress:
        progress.update(StepLine(1, 0.125, 999.0))
    assert capsys.readouterr().out.startswith("step 1/4  reward 0.125  999 tok/s")


def test_closing_tables():
    out = console(terminal=False)
    before = SuiteFigures({1: 0.125, 64: 0.875}, 5.0)
    after = SuiteFigures({1: 0.25, 64: 0.75, 128: 0.8}, 3.5)
    summary = RunSummary(
        steps=150,
        suites=[SuiteChange("countdown_dev", {"before": before, "after": after})],
        stage_seconds={"rollout": 20.0, "update": 20.0, "eval": 40.0, "other": 20.0, "odd": 0.0},
        tokens=80_000.0,
        peak_rss_bytes=3 * 2**29,
        padding=0.0123,
        imbalance=0.0,
        engine_gap=0.00123,
        largest_gap=0.25,
        reward_errors=0.0004,
    )
    print_summary(summary, out)
    rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in printed(out).splitlines()]
    assert ["1", "0.125", "0.250", "+0.125"] in rows
    assert ["64", "0.875", "0.750", "-0.125"] in rows
    assert ["128", "-", "0.800", "-"] in rows
    assert ["distinct correct", "5.000", "3.500", "-1.500"] in rows
    assert ["rollout", "20.0", "20%"] in rows
    assert not any(row[0] in ("annotate", "odd") for row in rows), "stages that took no time"
    assert ["tokens/s in training", "2,000", ""] in rows
    assert ["peak memory, MiB", "1,536", ""] in rows
    assert ["packed rows that are padding", "1.2%", ""] in rows
    assert ["DP imbalance", "0.0%", ""] in rows
    assert ["responses whose reward failed", "0.04%", ""] in rows
    assert ["engine gap, nats", "0.0012", ""] in rows
    assert ["engine gap, largest step", "0.25", ""] in rows
    assert "150 steps in 1:40" in printed(out)


def test_a_suites_name_is_not_read_as_markup():
    out = console(terminal=False)
    figures = SuiteFigures({1: 0.125}, 5.0)
    print_summary(RunSummary(1, [SuiteChange("[/dev] [red]:x:", {"before": figures})], {}, 0.0, 0), out)
    assert "[/dev] [red]:x:: pass@k" in printed(out)


def test_what_the_memory_network_does_stands_beside_it():
    """Also where a run was not evaluated before its first step."""
    out = console(terminal=False)
    evaluations = {"after": SuiteFigures({1: 0.25}, 3.5), "with memory": SuiteFigures({1: 0.2}, 4.25)}
    print_summary(RunSummary(1, [SuiteChange("dev", evaluations)], {}, 0.0, 0), out)
    rows = [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in printed(out).splitlines()
    ]
    assert ["k", "before", "after", "change", "with memory"] in rows
    assert ["1", "-", "0.250", "-", "0.200"] in rows
    assert ["distinct correct", "-", "3.500", "-", "4.250"] in rows


def test_a_run_of_nothing_still_has_a_table():
    out = console(terminal=False)
    print_summary(RunSummary(0, [], {}, 0.0, 0), out)
    assert "0 steps" in printed(out)
    assert not any(word in printed(out) for word in ("padding", "gap", "reward"))
