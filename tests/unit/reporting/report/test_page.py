"""The content of a page of runs: its sentences and bounds, and that no text of a run can break out of it."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from cases import each_case
from page_runs import EVIL, make_run, numbers, result

from megasharp.cli.report import write_report
from megasharp.common.errors import UserError
from megasharp.evals.result_files import save
from megasharp.reporting.history import kept_responses, read_run
from megasharp.reporting.page import responses
from megasharp.reporting.page.evaluations import SHARES, TENTHS
from megasharp.reporting.page.float_arrays import packed, thinned
from megasharp.reporting.page.metrics import words
from megasharp.reporting.page.records import Page, ranges, share_bin, spread_out
from megasharp.reporting.page.serve import as_html, as_json, read_page
from megasharp.reporting.show import screen


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "a", name="a")
    make_run(
        tmp_path / "b", name="b", seed=2, evaluations={0: result([0, 1, 2, 4], 8, 0), 6: result([1, 2, 3, 5], 8, 6)}
    )
    return tmp_path


@pytest.fixture
def page(runs: Path) -> Page:
    return read_page([runs / "a", runs / "b"], live=False)


def test_both_runs_share_the_base_and_each_has_its_last(page: Page) -> None:
    assert [(one.label, one.run, one.step, one.last) for one in page.models] == [
        ("base", 0, 0, False),
        ("a 6", 0, 6, True),
        ("b 6", 1, 6, True),
    ]


def test_figures_overlay_the_runs(page: Page) -> None:
    found = {figure.name: figure for figure in page.figures}
    assert [one.run for one in found["reward/mean"].series] == [0, 1]
    rewards, solved = found["reward/mean"].series[0], found["eval/dev/pass@8"].series[0]
    assert numbers(rewards.x) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] and rewards.low is None
    assert numbers(rewards.y) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert (numbers(solved.x), numbers(solved.y)) == ([0.0, 6.0], [0.75, 0.5])
    assert [*zip(numbers(solved.low), numbers(solved.high), strict=True)] == BOUNDS
    assert found["something/of_its_own"].section == "Everything else"
    assert found["candidates/lambda_1"].section != "Everything else"


def test_lengths_of_trained_and_discarded_responses_are_one_figure(page: Page) -> None:
    (figure,) = [one for one in page.figures if "responses" in one.name and "length" in one.name]
    labels = ["trained, mean", "trained, 90th percentile", "discarded, mean", "discarded, 90th percentile"]
    assert [(one.run, one.label) for one in figure.series] == [(run, label) for run in (0, 1) for label in labels]
    trained, at_90, discarded, _ = figure.series[:4]
    assert (numbers(trained.y)[:2], numbers(at_90.y)[:2]) == ([10.0, 11.0], [16.0, 17.0])
    assert (numbers(discarded.x), numbers(discarded.y)) == ([1.0, 2.0, 4.0, 5.0], [20.0] * 4)
    names = [one.name for one in page.figures]
    assert names.index(figure.name) == names.index("rollout/length_mean") + 1


# Of four problems, three and two of which are solved: the stored intervals, which the evaluation's tests check.
BOUNDS = [(0.25, 1.0), (0.0, 1.0)]


def test_what_each_model_gained_and_lost_against_the_base(page: Page) -> None:
    """Of four problems: a loses one and solves two always; b solves each once more, also one that the base did not."""
    (suite,) = page.pass_at_k
    assert suite.base == 0 and [one.model for one in suite.changes] == [1, 2]
    means = {one.model: {point[0]: point[1] for point in one.points} for one in suite.changes}
    assert means[1][1.0] == pytest.approx(16 / 32 - 7 / 32, abs=1e-5) and means[1][8.0] == -0.25
    assert means[2][1.0] == pytest.approx(11 / 32 - 7 / 32, abs=1e-5) and means[2][8.0] == 0.25
    assert all(point[2] <= point[1] <= point[3] for one in suite.changes for point in one.points)


def test_a_run_is_compared_with_its_own_samples_of_the_base(runs: Path, tmp_path: Path) -> None:
    """With another seed it drew others before its first step, and the first run's are drawn as the base's curve."""
    other = {0: result([3, 3, 3, 3], 8, 0), 6: result([4, 4, 4, 4], 8, 6)}
    make_run(tmp_path / "c", name="c", seed=3, evaluations=other)
    (suite,) = read_page([runs / "a", tmp_path / "c"], live=False).pass_at_k
    means = {one.model: {point[0]: point[1] for point in one.points} for one in suite.changes}
    assert means[1][1.0] == pytest.approx(16 / 32 - 7 / 32, abs=1e-5)
    assert means[2][1.0] == pytest.approx(4 / 8 - 3 / 8, abs=1e-5)


def test_evaluations_from_elsewhere_stand_beside_the_runs(runs: Path) -> None:
    """On the runs' suite they are compared with the base; another suite has a picture of its own."""
    beside = [save(result([2, 2, 2, 2], 8, 9), runs / "x"), save(result([1, 0], 8, 4, suite="test"), runs / "x")]
    found = read_page([runs / "a"], live=False, evals=beside)
    assert [(one.run, one.label) for one in found.models][-2:] == [(-1, "mine 9, n = 8"), (-1, "mine 4, n = 8")]
    dev, test = found.pass_at_k
    assert [one.model for one in dev.changes] == [1, 2] and dev.changes[1].points[0][1] == pytest.approx(
        8 / 32 - 7 / 32
    )
    assert "not all sampled at the same" not in dev.note
    hotter = save(replace(result([2, 2, 2, 2], 8, 9), temperature=0.6), runs / "y")
    assert "not all sampled at the same" in read_page([runs / "a"], live=False, evals=[hotter]).pass_at_k[0].note
    assert (test.suite, [one.model for one in test.models], test.base) == ("test", [3], None)
    assert [one.source for one in found.success][:2] == ["evaluation: dev", "evaluation: test"]
    with pytest.raises(UserError, match=r"missing.json: cannot read this evaluation"):
        read_page([runs / "a"], live=False, evals=[runs / "missing.json"])


def test_marks_tell_of_restarts_resets_and_stages(page: Page) -> None:
    assert [(mark.kind, mark.step) for mark in page.runs[0].marks] == [("restart", 3), ("stage", 3), ("reset", 4)]
    assert page.runs[0].marks[0].text == "attempt 2 begins: the one before was killed"


def test_the_candidates_of_both_runs_are_side_by_side(page: Page) -> None:
    (probe,) = page.probes
    assert probe.runs == [0, 1] and [one.model for one in probe.models] == [0, 1, 2]
    base, last, _ = probe.models
    assert base.rank_means[:3] == pytest.approx([0.52, 0.37, 0.11 / 6], abs=1e-4)
    assert sum(last.entropy) == pytest.approx(1.0) and last.mean_entropy < base.mean_entropy
    assert base.rank_bins[0][10] == 1.0 and last.rank_bins[0][18] == 1.0
    # To 0.95: six of the base's, two of the last's; the token said is of rank 1 (counted from 0), then 0.
    assert [len(cells[0]) for cells in (base.cells[0], last.cells[0])] == [2 + 2 * 6, 2 + 2 * 2]
    assert base.cells[0][0][:2] == [0.37, 1.0] and last.cells[0][0][:2] == [0.92, 0.0]
    assert probe.texts[0].tokens == ["one", " two", "\n", EVIL]


def test_runs_with_other_responses_are_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "a", name="a")
    make_run(tmp_path / "b", name="b", response=(3, 2, 1))
    assert [probe.runs for probe in read_page([tmp_path / "a", tmp_path / "b"], live=False).probes] == [[0], [1]]


def test_success_of_evaluations_and_of_training(page: Page) -> None:
    dev, training = page.success
    assert dev.source == "evaluation: dev"
    last = dict(zip(dev.labels, dev.bars[1].shares, strict=True))
    assert (last["0"], last["1"]) == (0.5, 0.5)
    assert [bar.label for bar in training.bars] == ["steps 1 to 2", "steps 5 to 6"] * 2
    assert dict(zip(training.labels, training.bars[0].shares, strict=True))["to 1/2"] == 1.0


@each_case(
    ("correct", "samples", "label"),
    [
        (0, 8, "0"),
        (1, 10, "to 0.1"),
        (3, 30, "to 0.1"),
        (4, 30, "to 0.2"),
        (9, 10, "to 0.9"),
        (31, 32, "below 1"),
        (8, 8, "1"),
    ],
)
def test_share_bins_are_exact(correct: int, samples: int, label: str) -> None:
    assert SHARES[share_bin(correct, samples, TENTHS)] == label


def test_responses_have_their_tokens_probabilities(page: Page) -> None:
    row = next(row for row in page.rollouts.rows if row.problem == "q0" and row.outcome == "correct")
    assert row.tokens == ["one", " two", "\n", EVIL] and row.probabilities == [100, 50, 5, 37]
    assert (row.prompt, row.answer, row.text) == ("0 2=3:", "1+2", "")
    assert {row.run for row in page.rollouts.rows} == {0, 1}
    assert len(page.rollouts.rows) == 2 * 6 * 4


def test_turns_stand_in_tokens_and_a_tools_error_is_nobodys(tmp_path: Path) -> None:
    """In characters where tokens are not kept. The first response's environment says what reports an error."""
    root = make_run(tmp_path / "turns", name="turns")
    path = root / "rollouts" / "step_000006.parquet"
    rows = pq.read_table(path)
    text = rows["text"].to_pylist()[2]
    assert responses.code_error(text)
    turns = [
        {"start": 0, "end": 1, "until": 3, "text_start": 0, "text_end": 0, "text_until": len(text), "reward": 0.5},
        {"start": 3, "end": 4, "until": 4, "text_start": 0, "text_end": len(text), "text_until": len(text)},
    ]
    for place in (0, 1):
        table = rows.to_pylist()
        table[2]["turn_places"] = [turns[place]]
        pq.write_table(rows.from_pylist(table, schema=rows.schema), path)
        found = [row for row in read_page([root], live=False).rollouts.rows if row.turns]
        assert [row.turns for row in found] == [[[1, 3, 0.5]] if place == 0 else [[4, 4, None]]]
        assert [bool(row.code_error) for row in found] == [bool(place)]
    (root / "rollout_tokens" / path.name).unlink()
    path.touch()
    (row,) = [row for row in read_page([root], live=False).rollouts.rows if row.turns]
    assert row.turns == [[len(text), len(text), None]] and row.text == text


def test_correct_responses_with_errors_of_code_are_counted_by_step(page: Page) -> None:
    series = page.code_errors.series[0]
    assert (numbers(series.x)[0], numbers(series.y)[0]) == (1, 0.5)
    assert page.code_errors.note.startswith("12 of 24 correct responses report an error")
    assert next(row.code_error for row in page.rollouts.rows if row.code_error) == "TypeError"


def test_the_page_stays_below_its_bound(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no run takes all of it."""
    monkeypatch.setattr(responses, "MOST_LETTERS", 6000)
    found = read_page([runs / "a", runs / "b"], live=False).rollouts
    assert 0 < len(found.rows) < 48 and {row.run for row in found.rows} == {0, 1}
    assert sum(map(responses._letters, found.rows)) <= 6000
    assert f"{len(found.rows)} responses are on this page" in found.note


def test_stages_add_up(page: Page) -> None:
    assert page.stages[0].names == ["update", "rollout"]
    assert page.stages[0].rows[0] == [1, 1, 1.5, 0.5]
    assert dict(page.stages[0].totals)["steps that count"] == "0:12"
    assert "No NVML telemetry" in page.telemetry


def test_evaluations_and_saves_are_in_the_bar_of_the_step_after_which_they_came(runs: Path) -> None:
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        for row in ({"step": 0, "time/eval": 9.0}, {"step": 3, "time/eval": 7.0}, {"step": 3, "time/checkpoint": 1.0}):
            file.write(json.dumps({"time": 1006.0, **row}) + "\n")
    page = read_page([runs / "a"], live=False)
    assert page.stages[0].names == ["eval", "update", "rollout", "checkpoint"]
    first, *_, third, fourth, _, _ = page.stages[0].rows
    assert (first, third, fourth) == ([0, 0, 9.0, 0, 0, 0], [3, 3, 7.0, 1.5, 0.5, 1.0], [4, 4, 0, 1.5, 0.5, 0])
    seconds = next(figure for figure in page.figures if figure.name == "time/step").series[0]
    assert (numbers(seconds.x), numbers(seconds.y)) == ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0] * 6)


def test_the_words_say_what_collapsed_and_what_is_noise() -> None:
    """Changes are judged by intervals over the same problems."""
    many = range(100)
    base = result([2 + place % 3 for place in many], 8, 0)
    collapsed = result([8 if place % 2 else 0 for place in many], 8, 9)
    same = result([2 + (place + 1) % 3 for place in many], 8, 9)
    fell = _words({(0, 0, "dev"): base, (0, 9, "dev"): collapsed})
    assert "pass@8 falls from 1.00 to 0.50" in fell and "collapsing onto few answers" in fell
    noise = _words({(0, 0, "dev"): base, (0, 9, "dev"): same})
    assert "pass@1 does not change beyond its noise" in noise and "collapsing" not in noise
    assert _words({(0, 0, "dev"): base}) == ""
    ends = _words({(0, 9, "dev"): base, (1, 9, "dev"): same}, "mine", "casp")
    assert "mine 1.00, casp 1.00 (mine against casp: within the noise over problems)" in ends


def _words(results: dict, *names: str) -> str:
    class Silent:
        last_step = 9

        def series(self, name: str) -> list[tuple[int, float]]:
            return []

    return "\n".join(words([Silent()] * len(names or "1"), names or ["mine"], results))


def test_settings_that_differ_are_told(page: Page) -> None:
    assert {one.key: one.values for one in page.differences} == {
        "seed": ["1", "2"],
        "policy.optimizer.lr": ["0.1", "0.2"],
    }


def test_a_card_says_what_its_run_is(runs: Path, page: Page) -> None:
    assert [run.what for run in page.runs] == ["policy.optimizer.lr 0.1", "policy.optimizer.lr 0.2"]
    config = runs / "b" / "config.yaml"
    config.write_text(f"{config.read_text()}recipe: {{methods: [grpo, casp], casp: {{alpha: 0.5, topn: 3}}}}\n")
    assert read_page([runs / "b"], live=False).runs[0].what == "grpo, casp (alpha 0.5)"


class Scripts(HTMLParser):
    """The contents of script elements, as a browser takes them, and every other element's name."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict, str]] = []
        self.elements: list[str] = []
        self._open: dict | None = None

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.append(tag)
        if tag == "script":
            self._open = dict(attrs)

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.scripts.append((self._open, data))

    def handle_endtag(self, tag: str) -> None:
        self._open = None


def test_no_text_breaks_out_of_the_page(page: Page) -> None:
    """Prompts, responses, tokens: one data element, one script, and what is read from the data is what was said."""
    text = as_html(page)
    parser = Scripts()
    parser.feed(text)
    assert [attributes for attributes, _ in parser.scripts] == [{"type": "application/json", "id": "data"}, {}]
    assert "img" not in parser.elements and parser.elements.count("script") == 2
    data = json.loads(parser.scripts[0][1])
    assert data["probes"][0]["texts"][0]["prompt"] == f"prompt {EVIL}"
    digest = base64.b64encode(hashlib.sha256(parser.scripts[1][1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "connect-src 'none'" in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_halves_of_surrogate_pairs_are_readable(page: Page) -> None:
    object.__setattr__(page.rollouts, "note", "half \ud83d pair")
    assert json.loads(as_json(page).encode("utf-8"))["rollouts"]["note"] == "half \ufffd pair"


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    """No step, no evaluation, no response."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("name: new\nsteps: 3\n")
    page = read_page([tmp_path / "new"], live=False)
    assert (page.figures, page.probes, page.rollouts.rows, page.words) == ([], [], [], [])
    assert "<title>new</title>" in as_html(page)


def test_tables_of_older_versions_are_shown_without_shading(tmp_path: Path) -> None:
    root = make_run(tmp_path / "a")
    path = root / "rollouts" / "step_000001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["prompt"]), path)
    (root / "rollout_tokens" / path.name).unlink()
    row = read_page([root], live=False).rollouts.rows[0]
    assert (row.tokens, row.prompt) == ([], "") and row.text


def test_responses_that_retention_removed_are_told_and_not_missed(tmp_path: Path) -> None:
    """On the page and on the screen, also where a table is gone that retention would keep, or all are."""
    root = make_run(tmp_path / "a")
    assert "retention" not in read_page([root], live=False).rollouts.note
    with (root / "config.yaml").open("a") as file:
        file.write("log: {rollouts: {keep_last: 2, every: 3}}\n")
    for step in (1, 2, 4):
        (root / "rollouts" / f"step_{step:06d}.parquet").unlink()
    told = "tables of responses of 3 of 6 steps; retention removed 3 (log.rollouts: keep_last 2, every 3)"
    found = read_page([root], live=False).rollouts
    assert told in found.note and {row.step for row in found.rows} == {3, 5, 6}
    console = Console(width=150)
    with console.capture() as captured:
        console.print(screen(read_run(root)))
    assert told in captured.get()
    (root / "rollouts" / "step_000006.parquet").unlink()
    assert kept_responses(read_run(root)).endswith("every 3), 1 are missing")
    shutil.rmtree(root / "rollouts")
    assert "No responses are there (log.rollouts). mine: tables" in read_page([root], live=False).rollouts.note


def test_mistakes_are_told_in_one_line(runs: Path) -> None:
    with pytest.raises(UserError, match="report: the same run is named twice"):
        write_report([runs / "a", runs / "a"], None)
    with pytest.raises(UserError, match=r"--out .*: this is a folder"):
        write_report([runs / "a"], runs)
    (runs / "a" / "rollouts" / "step_000002.parquet").write_text("torn")
    with pytest.raises(UserError, match=r"step_000002.parquet: cannot read .* remove it"):
        write_report([runs / "a"], None)


def test_where_the_page_is_written(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_report([runs / "a"], None) == runs / "a" / "report.html"
    assert write_report([runs / "a", runs / "b"], None) == runs / "report.html"
    monkeypatch.chdir(runs.parent)
    here = Path(runs.name)
    assert write_report([here / "a"], None) == here / "a" / "report.html"
    assert write_report([here / "a", here / "b"], None) == here / "report.html", "told as it was given"
    monkeypatch.chdir(runs / "a")
    assert write_report([Path(), Path("../b")], None) == runs / "report.html"
    assert write_report([runs / "a"], runs / "deep" / "page.html").stat().st_size < 400_000


def test_an_evaluation_that_cannot_be_read_is_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "a" / "evals" / "step_000006" / "dev.json").write_text("{")
    (line,) = read_page([runs / "a"], live=False).unread
    assert "dev.json" in line
    write_report([runs / "a"], None)
    assert capsys.readouterr().err == f"megasharp: left out of the report: {line}\n"


def test_many_things_become_few() -> None:
    assert spread_out(range(5), 9) == [0, 1, 2, 3, 4]
    assert spread_out(range(101), 5) == [0, 32, 64, 96, 100]
    assert spread_out([], 5) == [] and spread_out([7], 2) == [7]
    for count in range(1, 60):
        chosen = spread_out(range(count), 6)
        assert len(chosen) <= 6 and chosen[0] == 0 and chosen[-1] == count - 1
        assert {*chosen[:-1:2]} <= {*spread_out(range(count + 1), 6)}
    points = [(float(step), float(step % 2)) for step in range(1, 1001)]
    steps, means = thinned(points, 100)
    assert len(steps) == len(means) == 100 and (steps[0], means[0]) == (5.5, 0.5)
    steps, means = thinned(points[:5], 2)
    assert (steps.tolist(), means.tolist()) == ([2.0, 4.5], [pytest.approx(2 / 3), 0.5])
    assert [list(part) for part in ranges(5, 2)] == [[0, 1, 2], [3, 4]] and ranges(0, 2) == []


@each_case(
    ("values", "short"),
    [
        ([1.0, 2.0, 3.0], True),
        ([0.5] * 9, True),
        ([4.0], True),
        ([], True),
        ([1.0, 2.0, 4.0], False),
        ([0.1, 1e-30, -3e9], False),
    ],
)
def test_packed_numbers_are_what_they_were(values: list[float], short: bool) -> None:
    """Equal distances take three numbers, others seven digits each."""
    made = packed(values)
    assert isinstance(made, list) is short
    assert numbers(made) == pytest.approx(values, rel=1e-7)


def test_metrics_that_are_zero_in_every_run_are_marked(page: Page, runs: Path) -> None:
    """One that is zero in one run only is compared with the other."""
    before = {figure.name for figure in page.figures if figure.zero}
    for name, value in (("a", 0.0), ("b", 1.0)):
        path = runs / name / "metrics.jsonl"
        added = {"policy/spikes": 0.0, "policy/skipped": value}
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | added) + "\n" for row in rows))
    after = {figure.name for figure in read_page([runs / "a", runs / "b"], live=False).figures if figure.zero}
    assert after - before == {"policy/spikes"}


def test_history_of_the_made_run_reads(runs: Path) -> None:
    assert read_run(runs / "a").last_step == 6
