"""The page in a real headless Chromium: every figure, every control, no error and no request; served, it refreshes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait
from waiting import HANG_S

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "reporting" / "report"))

from page_runs import EVIL, make_run, result
from page_samples import samples, store

from megasharp.cli.report import write_report
from megasharp.evals.result_files import save

pytestmark = pytest.mark.long("examples")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,900")
FIGURES = {
    *("reward/mean", "eval/dev/pass@1", "eval/dev/pass@8", "entropy/policy", "candidates/lambda_1"),
    *("candidates/gate_rate", "policy/clip_high", "pass@k dev", "change dev", "candidates base", "candidates a 6"),
    *("candidates b 6", "rank means", "entropy histogram", "rank 1 bins", "rank 2 bins", "rank 3 bins"),
    *("success evaluation: dev", "success training: groups of responses", "code errors", "stages a", "stages b"),
    *("rollout/tokens_per_second", "rollout/length_mean", "responses/lengths"),
}
CHART = "const of = (name) => [...charts].find(([host]) => host.dataset.chart === name)[1];"
DOM = Path(__file__).parents[2] / "megasharp" / "reporting" / "page" / "static" / "dom.js"


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    if CHROMIUM is None or DRIVER is None:
        pytest.fail("no chromium and chromedriver on PATH: .ci/packages installs them")
    options = Options()
    options.binary_location = CHROMIUM
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "a", name="a")
    better = {0: result([0, 1, 2, 4], 8, 0), 6: result([1, 2, 3, 5], 8, 6)}
    make_run(folder / "b", name="b", seed=2, evaluations=better)
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> str:
    return write_report([runs / "a", runs / "b"], None).as_uri()


@pytest.fixture
def page(browser: webdriver.Chrome, address: str) -> webdriver.Chrome:
    logs(browser)
    browser.get(address)
    browser.execute_script("localStorage.clear()")
    return browser


def of_chart(browser: webdriver.Chrome, name: str, what: str) -> object:
    """A value of a chart that is drawn: `u` is uPlot's own object."""
    return browser.execute_script(f"{CHART} const u = of(arguments[0]); return {what}", name)


def draw_all(browser: webdriver.Chrome) -> None:
    """As if the reader had scrolled over the whole page."""
    browser.execute_script("[...waiting.keys()].filter((host) => host.clientWidth).forEach(drawChart)")


def shown_steps(browser: webdriver.Chrome) -> list[list[float]]:
    """The range of steps of every chart over steps that is drawn."""
    ends = "[drawn.scales.x.min, drawn.scales.x.max]"
    return browser.execute_script(
        f"return [...charts.values()].filter((drawn) => drawn.axis === 'step').map((drawn) => {ends})"
    )


def middle(browser: webdriver.Chrome, name: str) -> WebElement:
    """The plotting area of a chart, in the middle of the window."""
    area = find(browser, f"[data-figure='{name}'] .u-over")[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", area)
    return area


def at_width(browser: webdriver.Chrome, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def logs(browser: webdriver.Chrome) -> tuple[list[str], list[str]]:
    """Console lines and requested addresses since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [entry["message"] for entry in browser.get_log("browser")], asked


def find(browser: webdriver.Chrome, css: str) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, css)


def texts(browser: webdriver.Chrome, css: str) -> list[str]:
    """In one go: a served page may replace its elements at any moment."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", css
    )


def pressed(browser: webdriver.Chrome) -> list[str]:
    """The models that are shown, as the folded part says too."""
    script = "return [...document.querySelectorAll('#passk .chip[aria-pressed=true]')].map((one) => one.textContent)"
    return browser.execute_script(script)


def choose(browser: webdriver.Chrome, label: str, value: str) -> None:
    Select(find(browser, f"select[aria-label='{label}']")[0]).select_by_value(value)


def count(browser: webdriver.Chrome) -> int:
    return int(re.match(r"[\d,]+", find(browser, "#rollouts .count")[0].text)[0].replace(",", ""))


def click(browser: webdriver.Chrome, css: str, text: str) -> None:
    """By script, in one go: a sticky bar may lie above what is clicked, and a served page replaces its elements."""
    found = "[...document.querySelectorAll(arguments[0])].find((one) => one.innerText.includes(arguments[1]))"
    browser.execute_script(f"{found}.click()", css, text)


def test_no_two_numbers_of_an_axis_are_alike(browser: webdriver.Chrome) -> None:
    script = "return arguments[0].map(numbers)"
    browser.get("about:blank")
    browser.execute_script(f"window.eval({json.dumps(DOM.read_text())} + '; window.numbers = numbers')")
    axes = [[0.2488, 0.249, 0.2492], [0.99996, 0.99998, 1, 1.00002], [0, 0.5, 1], [1000, 2000], [1000.2, 1000.4]]
    assert browser.execute_script(script, axes) == [
        *(["0.2488", "0.249", "0.2492"], ["0.99996", "0.99998", "1", "1.00002"], ["0", "0.5", "1"]),
        *(["1,000", "2,000"], ["1000.2", "1000.4"]),
    ]


def test_the_page_is_whole_and_asks_for_nothing(page: webdriver.Chrome) -> None:
    console, asked = logs(page)
    assert console == []
    assert [url for url in asked if not url.startswith("file:")] == [] and len(asked) == 1
    assert page.title == "a, b", "a response tried to change it"
    assert find(page, "img") == []
    drawn = {figure.get_attribute("data-figure"): figure for figure in find(page, "figure[data-figure]")}
    assert drawn.keys() >= FIGURES, FIGURES - drawn.keys()
    page.execute_script("document.querySelectorAll('.group').forEach((box) => { box.open = true; })")
    draw_all(page)
    marks = "canvas, path.curve, rect, td.cell"
    empty = [name for name, figure in drawn.items() if not figure.find_elements(By.CSS_SELECTOR, marks)]
    assert empty == []
    ink = "[...u.ctx.getImageData(0, 0, u.ctx.canvas.width, u.ctx.canvas.height).data].filter((part) => part).length"
    assert of_chart(page, "reward/mean", ink) > 4000 and of_chart(page, "change dev", ink) > 4000
    assert "pass@8" in find(page, ".words")[0].text
    assert len(find(page, "#settings tr")) == 3


def test_numbers_of_every_chart_can_be_read(page: webdriver.Chrome) -> None:
    script = """return [...document.querySelectorAll('figure svg')].map((one) =>
        parseFloat(getComputedStyle(one.querySelector('text')).fontSize) * one.getBoundingClientRect().width / 420)"""
    sizes = page.execute_script(script)
    assert min(sizes) > 10.5 and max(sizes) < 1.5 * min(sizes)
    draw_all(page)
    assert of_chart(page, "reward/mean", "u.axes.map((axis) => axis.font[1])") == [12, 12]


def test_both_ends_of_a_histogram_are_named(page: webdriver.Chrome) -> None:
    for source in ("evaluation: dev", "training: groups of responses"):
        names = page.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)",
            f"[data-figure='success {source}'] svg text[text-anchor='middle']",
        )
        assert (names[0], names[-2], names[-1]) == ("0", "1", "share correct")


SPY = """window.written = [];
window.written_by = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const width = this.measureText(text).width, start = { center: 0.5, right: 1, end: 1 }[this.textAlign] || 0;
  const { a, e } = this.getTransform();
  const left = a * (x - start * width) + e, chart = this.canvas.closest(".chart").dataset.chart;
  written.push({ chart, text, ends: [left, left + a * width], edge: this.canvas.width, turned: this.getTransform().b });
  written_by.call(this, text, x, y);
};"""
NAMES = [
    f"{kind}-with-casp-and-a-long-name-on-countdown-at-seed-{seed}" for kind in ("grpo", "dapo") for seed in (1, 2)
]


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_names_values_and_numbers_at_edges_are_whole(browser: webdriver.Chrome, tmp_path: Path, width: int) -> None:
    """Names may lack their middle, where they still differ; values at lines' ends and an axis's last number may not."""
    found = {0: result([0, 1, 2, 4], 8, 0), 100: result([1, 2, 3, 5], 8, 100), 2000: result([0, 2, 2, 8], 8, 2000)}
    for seed, name in enumerate(NAMES, 1):
        make_run(tmp_path / name, steps=1, name=name, seed=seed, evaluations=found)
    made = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": SPY})
    at_width(browser, width)
    try:
        browser.get(write_report([tmp_path / name for name in NAMES], None).as_uri())
        browser.execute_script(
            "state.models = new Set(data.models.map(nameOf)); redraw('passk');"
            "document.querySelectorAll('details').forEach((box) => { box.open = true; }); written.length = 0"
        )
        draw_all(browser)
        written = browser.execute_script("return written")
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    cut = [one for one in written if not one["turned"] and not 0 <= one["ends"][0] <= one["ends"][1] <= one["edge"]]
    assert written and cut == []
    last = [one for one in written if one["chart"] == "eval/dev/pass@8" and one["text"] == "2,000"]
    assert len(last) == 1
    for chart, values in {"pass@k dev": {"1", "0.75"}, "change dev": {"0", "0.25"}}.items():
        named = [one["text"] for one in written if one["chart"] == chart and re.match("base|gr|da", one["text"])]
        names, ends = zip(*(text.rsplit(" ", 1) for text in named), strict=True)
        assert len({*names}) == len(names) == (9 if chart == "pass@k dev" else 8) and {*ends} == values
        assert sum(name.endswith("2000") for name in names) == 4, "the step is seen"


def test_runs_that_coincide_are_both_seen(page: webdriver.Chrome) -> None:
    draw_all(page)
    assert of_chart(page, "reward/mean", "u.series.slice(1).map((one) => one.dash || null)") == [None, [6, 4]]
    edges, fill = "u.bands.map((band) => band.series)", "u.bands.map((band) => band.fill(u, 0).slice(0, 7))"
    assert of_chart(page, "pass@k dev", edges) == [[2, 1], [5, 4], [8, 7]]
    assert of_chart(page, "pass@k dev", fill) == ["#6b7280", "#0060a8", "#b8560f"]
    of_models = "u.series.slice(1).filter((one) => one.width === 2).map((one) => one.dash || null)"
    assert of_chart(page, "pass@k dev", of_models) == [[6, 4], None, [6, 4]], "the base, run a, run b as in its curves"


def test_a_part_about_code_is_absent_where_no_response_has_an_error(page: webdriver.Chrome) -> None:
    (link,) = find(page, "#nav a[href='#errors']")
    assert link.is_displayed() and find(page, "#errors h2")
    page.execute_script("data.code_errors.series = []; draw()")
    assert not link.is_displayed() and not find(page, "#errors h2")


def test_a_card_leads_to_the_settings_that_differ(page: webdriver.Chrome) -> None:
    first, second = find(page, ".run a")
    assert (first.text, second.text) == ("policy.optimizer.lr 0.1", "policy.optimizer.lr 0.2")
    first.click()
    assert page.current_url.endswith("#settings")


def test_values_of_all_runs_are_shown_under_the_cursor(page: webdriver.Chrome) -> None:
    draw_all(page)
    webdriver.ActionChains(page).move_to_element(middle(page, "reward/mean")).perform()
    hint = find(page, "#tip")[0]
    assert hint.is_displayed() and hint.text.startswith("step 3")
    assert [row.text for row in hint.find_elements(By.TAG_NAME, "tr")] == ["a 0.3", "b 0.3"]
    assert "a, after step 3: attempt 2 begins" in hint.text
    assert of_chart(page, "policy/clip_high", "u.data[0][u.cursor.idx]") == 3, "the other charts follow the cursor"
    page.execute_script("draw()")
    assert hint.is_displayed() and hint.text.startswith("step 3"), "as it was before news came"
    find(page, "h1")[0].click()
    webdriver.ActionChains(page).move_to_element(middle(page, "eval/dev/pass@8")).move_by_offset(170, 0).perform()
    assert "a 0.5 (0 to 1)" in hint.text


def test_a_drag_zooms_all_charts_of_the_axis(page: webdriver.Chrome) -> None:
    draw_all(page)
    ks = "[u.scales.x.min, u.scales.x.max]"
    before = of_chart(page, "pass@k dev", ks)
    area = middle(page, "reward/mean")
    width = area.size["width"]
    drag = webdriver.ActionChains(page).move_to_element_with_offset(area, -width // 6, 0).click_and_hold()
    drag.move_by_offset(width // 3, 5).release().perform()
    ranges = shown_steps(page)
    assert len(ranges) > 20 and all(one == ranges[0] for one in ranges)
    low, high = ranges[0]
    assert low == pytest.approx(2, abs=0.1) and high == pytest.approx(4, abs=0.1)
    assert of_chart(page, "pass@k dev", ks) == before, "k is another axis"
    fields = [field.get_attribute("value") for field in find(page, ".range input")]
    assert fields == ["2", "4"]
    click(page, "#curves label", "logarithmic")
    assert all(one == ranges[0] for one in shown_steps(page)), "charts that are drawn anew are zoomed too"
    webdriver.ActionChains(page).double_click(middle(page, "entropy/policy")).perform()
    assert all(one == [0, 6] for one in shown_steps(page))
    change = "const field = document.querySelector('.range [name=first]'); field.value = 3; "
    page.execute_script(change + "field.dispatchEvent(new Event('change'))")
    assert all(one == [3, 6] for one in shown_steps(page)), "without a mouse"
    click(page, ".range button", "all steps")
    assert all(one == [0, 6] for one in shown_steps(page)) and logs(page)[0] == []


def test_metrics_are_found_by_words_and_by_key(page: webdriver.Chrome) -> None:
    field = find(page, "#query")[0]
    shown = "#curves figure, #pinned figure, #time figure"
    for typed, names in {
        "clipped above": {"policy/clip_high"},
        "POLICY/clip_h": {"policy/clip_high"},
        "step seconds": {"time/step", "time/update", "time/rollout"},
        "no such metric": set(),
    }.items():
        field.send_keys(Keys.CONTROL, "a", Keys.NULL, typed)
        found = {figure.get_attribute("data-figure") for figure in find(page, shown)}
        assert {name for name in found if not name.startswith("stages ")} == names
        assert f"{len(names)} of " in find(page, "#curves .count")[0].text
        assert page.switch_to.active_element == field, "one types on"
    field.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.DELETE)
    assert len(find(page, "#curves figure")) > 20 and find(page, "#curves .count") == []
    caption = find(page, "[data-figure='policy/clip_high'] b")[0]
    assert (caption.text, caption.get_attribute("title")) == ("share of tokens clipped above", "policy/clip_high")


PINNED = "#pinned figure"


def test_pins_outlive_the_page(page: webdriver.Chrome, address: str) -> None:
    click(page, "[data-figure='policy/clip_high'] .pin", "pin")
    (figure,) = find(page, PINNED)
    assert figure.get_attribute("data-figure") == "policy/clip_high"
    assert find(page, "#curves [data-figure='policy/clip_high']") == [], "it moved"
    page.get(address)
    assert len(find(page, PINNED)) == 1
    click(page, f"{PINNED} .pin", "unpin")
    assert find(page, PINNED) == [] and len(find(page, "#curves [data-figure='policy/clip_high']")) == 1
    page.get(address)
    assert find(page, PINNED) == []


def test_pins_work_where_nothing_can_be_stored(page: webdriver.Chrome, address: str) -> None:
    broken = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('forbidden'); } })"
    made = page.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": broken})
    try:
        page.get(address)
        click(page, "[data-figure='policy/clip_high'] .pin", "pin")
        assert len(find(page, PINNED)) == 1 and logs(page)[0] == []
        page.get(address)
        assert find(page, PINNED) == []
    finally:
        page.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)


def test_charts_that_are_zero_throughout_are_folded_away(page: webdriver.Chrome) -> None:
    (box,) = find(page, "[data-fold='charts: zero']")
    assert box.get_attribute("open") is None and box.text.startswith("Zero at every step")
    assert not find(page, "[data-figure='eval/dev/infra']")[0].is_displayed()
    page.execute_script("arguments[0].firstChild.click(); arguments[0].scrollIntoView()", box)
    WebDriverWait(page, HANG_S).until(lambda driver: find(driver, "[data-figure='eval/dev/infra'] canvas"))


def of_stored(browser: webdriver.Chrome, label: str, value: str) -> None:
    Select(find(browser, f"#stored select[aria-label='{label}']")[0]).select_by_value(value)


def test_stored_samples_are_filtered_and_set_side_by_side(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Two judgements of one model, then two models; no hostile text runs, turns its neighbours around or widens it."""
    root = make_run(tmp_path / "s", name="s")
    evals = root / "evals"
    store(evals / "step_000000", samples(4, lambda number, index: index < number), step=0, label="s")
    store(evals / "step_000006", samples(4, lambda number, index: index < 3, 1), label="s")
    again = samples(4, lambda number, index: index < 3 + (number == 2), 1)
    store(evals / "step_000006" / "rejudged", again, label="s", keep="answers", judged="again")
    logs(browser)
    browser.get(write_report([root], None).as_uri())
    # Of each problem 6 samples and a greedy one, which is as its first.
    for verdict, number in (("correct", 4 * 4), ("wrong", 4 * 3), ("changed", 1), ("", 4 * 7)):
        of_stored(browser, "verdict", verdict)
        assert texts(browser, "#stored .count") == [f"{number} samples"]
    of_stored(browser, "samples of", "s 0")
    of_stored(browser, "beside", "s 6: first judgement")
    of_stored(browser, "verdict", "changed")
    assert texts(browser, "#stored .count") == ["3 problems"], "p3 is solved by three samples of both"
    assert texts(browser, "#stored .pair h3") == ["s 0", "s 6: first judgement"]
    assert [len(find(browser, f"#stored .pair > :nth-child({column}) .card")) for column in (1, 2)] == [7, 7]
    turned = """const at = (part) => [part.getBoundingClientRect().top, part.getBoundingClientRect().left];
        const spans = [...document.querySelectorAll('#stored .card header > span')];
        const parts = spans.map((one) => [...one.querySelectorAll('bdi')]);
        return parts.filter((some) => some.length > 1).map((some) => some.map(at));"""
    pairs = browser.execute_script(turned)
    assert pairs and all(answer < detail for answer, detail in pairs), "an answer of marks stays before the detail"
    at_width(browser, 390)
    root_element = "document.documentElement"
    assert browser.execute_script(f"return {root_element}.scrollWidth === {root_element}.clientWidth")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert browser.title == "s" and find(browser, "img") == [] and logs(browser)[0] == []


def test_an_evaluation_without_a_run_has_a_page(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """It is written beside the result, and has what evaluations have."""
    store(tmp_path / "served", samples(4, lambda number, index: index < number), label="served")
    written = save(result([0, 1, 2, 3], 8, 6), tmp_path / "served")
    path = write_report([], None, [written])
    assert path == tmp_path / "served" / "report.html"
    logs(browser)
    browser.get(path.as_uri())
    assert texts(browser, "#nav a:not([hidden])") == ["pass@k", "Prompts", "Samples"] and browser.title
    assert texts(browser, "#stored .count") == ["28 samples"] and logs(browser)[0] == []


def test_parts_are_folded_on_a_phone(page: webdriver.Chrome, address: str) -> None:
    at_width(page, 390)
    page.get(address)
    assert find(page, "details.part[open]") == []
    assert page.execute_script("return document.documentElement.scrollHeight") < 4000
    click(page, "nav a", "pass@k")
    assert find(page, "#passk")[0].get_attribute("open")
    WebDriverWait(page, HANG_S).until(lambda driver: find(driver, "[data-figure='pass@k dev'] canvas"))
    page.execute_script("document.querySelector('#curves > summary').click()")
    click(page, "#curves .group:first-of-type > summary", "Reward")
    WebDriverWait(page, HANG_S).until(lambda driver: find(driver, "[data-figure='reward/mean'] canvas"))
    click(page, "#curves .chip", "b")
    assert find(page, "#curves")[0].get_attribute("open"), "what was opened stays open"
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_runs_scales_and_models_can_be_chosen(page: webdriver.Chrome) -> None:
    draw_all(page)
    count_of = "u.series.length - 1"
    assert of_chart(page, "reward/mean", count_of) == 2
    click(page, "#curves .chip", "b")
    draw_all(page)
    assert of_chart(page, "reward/mean", count_of) == 1
    click(page, "#curves .chip", "b")
    assert of_chart(page, "reward/mean", "u.scales.y.distr") == 1
    click(page, "#curves label", "logarithmic")
    draw_all(page)
    assert of_chart(page, "reward/mean", "[u.scales.y.distr, u.data.length]") == [3, 3]
    page.execute_script(
        "const s = document.querySelector('input[type=range]'); s.value = 0.3; s.dispatchEvent(new Event('change'))"
    )
    draw_all(page)
    assert of_chart(page, "reward/mean", "u.series.slice(1).map((one) => one.width)") == [1, 2, 1, 2]
    click(page, "#passk .chip", "base")
    assert find(page, "[data-figure='candidates base']") == [], "a model is chosen for the whole page"
    click(page, "summary", "Further charts")
    page.execute_script("document.querySelector('[data-figure=\"something/of_its_own\"]').scrollIntoView()")
    WebDriverWait(page, HANG_S).until(lambda driver: find(driver, "[data-figure='something/of_its_own'] canvas"))
    assert logs(page)[0] == []


def test_the_candidates_frame_what_was_said(page: webdriver.Chrome) -> None:
    base, last = (find(page, f"[data-figure='candidates {name}'] tbody tr") for name in ("base", "a 6"))
    assert (len(base), len(last)) == (6, 2), "to 0.95 of the probability"
    assert len(find(page, "[data-figure='candidates base'] tbody tr:nth-child(2) td.said")) == 4
    assert len(find(page, "[data-figure='candidates a 6'] tbody tr:nth-child(1) td.said")) == 4


def test_filters_of_the_browser(page: webdriver.Chrome) -> None:
    """Each narrows the responses as a count over the made runs says: 6 steps, 2 prompts, 2 responses, 2 runs."""
    assert count(page) == 48
    expected = {
        "outcome": ("correct", 24),
        "step": ("3", 8),
        "problem": ("q1", 24),
        "reward": ("one", 24),
        "run": ("1", 24),
    }
    for label, (value, left) in expected.items():
        choose(page, label, value)
        assert count(page) == left, label
        click(page, "#rollouts button", "clear filters")
    choose(page, "code errors", "yes")
    assert count(page) == 12 and "reports TypeError" in find(page, ".card")[0].text
    click(page, "#rollouts button", "clear filters")
    search = "const box = document.querySelector('#rollouts input[type=search]'); box.value = arguments[0]; "
    page.execute_script(search + "box.dispatchEvent(new Event('input'))", EVIL[:20])
    assert count(page) == 48, "it is in every response's tokens"
    click(page, "#rollouts button", "clear filters")
    find(page, "#rollouts input[type=search]")[0].click()
    for sign in "no such words":  # as one types: each sign is heard, and the cursor stays
        page.switch_to.active_element.send_keys(sign)
    assert count(page) == 0
    assert page.switch_to.active_element.get_attribute("value") == "no such words"
    click(page, "#rollouts button", "clear filters")
    tokens = find(page, ".card:first-child .token")
    shades = [token.get_attribute("style") for token in tokens]
    assert len(tokens) == 4 and "--p: 0.00" in shades[0] and "--p: 0.45" in shades[1]
    assert len(find(page, ".card")) == 20 and "page 1 of 3" in find(page, "#rollouts")[0].text
    click(page, "#rollouts button", "later")
    assert "page 2 of 3" in find(page, "#rollouts")[0].text


def test_two_runs_side_by_side(page: webdriver.Chrome) -> None:
    click(page, "#rollouts label", "two runs side by side")
    columns = find(page, ".pair > div")
    assert [column.find_element(By.TAG_NAME, "h3").text for column in columns] == [
        "a: 1 of 2 correct",
        "b: 1 of 2 correct",
    ]
    choose(page, "prompt", "3")
    assert "Step 2" in find(page, "#rollouts")[0].text


@pytest.mark.parametrize("width", [1400, 700, 390])
def test_nothing_is_wider_than_the_window(page: webdriver.Chrome, width: int) -> None:
    at_width(page, width)
    page.execute_script("document.querySelectorAll('details').forEach((box) => { box.open = true; })")
    draw_all(page)
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_light_dark_and_print(page: webdriver.Chrome) -> None:
    def paper() -> str:
        return page.execute_script("return getComputedStyle(document.body).backgroundColor")

    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    WebDriverWait(page, HANG_S).until(lambda driver: paper() == "rgb(13, 17, 23)")
    page.refresh()
    assert paper() == "rgb(13, 17, 23)", "as the system is"
    click(page, "#theme", "dark / light")
    assert paper() == "rgb(255, 255, 255)"
    draw_all(page)
    stroke = "u.series[1].stroke(u, 1).slice(0, 7)"
    assert of_chart(page, "reward/mean", stroke) == "#0060a8"
    click(page, "#theme", "dark / light")
    assert of_chart(page, "reward/mean", stroke) == "#58b2ff"
    page.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert of_chart(page, "reward/mean", stroke) == "#0060a8", "on paper it is light"
    assert find(page, "details.part:not([open])") == [] and page.execute_script("return charts.size") > 20
    page.execute_script("window.dispatchEvent(new Event('afterprint'))")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not find(page, "nav")[0].is_displayed()
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_a_served_page_refreshes_and_keeps_what_was_chosen(browser: webdriver.Chrome, tmp_path: Path) -> None:
    root = make_run(tmp_path / "runs" / "mine")
    command = [
        sys.executable,
        "-m",
        "megasharp.cli",
        "report",
        "mine",
        "--serve",
        "--port",
        "0",
        "--runs",
        str(root.parent),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            url = re.match(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{22}", said)[0]
            start, query = url.split("?")
            logs(browser)
            browser.get(url)
            browser.execute_script("localStorage.clear(); state.pins.clear()")
            click(browser, "#curves label", "logarithmic")
            click(browser, "[data-figure='policy/clip_high'] .pin", "pin")
            browser.execute_script("document.querySelector('#passk > summary').click(); zoom('step', [2, 5])")
            find(browser, "#query")[0].send_keys("mean")
            browser.execute_script("window.scrollTo(0, 300)")
            assert pressed(browser) == ["base", "mine 6"]
            save(result([1, 2, 3, 5], 8, 7), root / "evals" / "step_000007")
            with (root / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 7, "time": time.time(), "time/step": 2.0, "reward/mean": 0.7}) + "\n")
            WebDriverWait(browser, HANG_S).until(lambda driver: "step 7 of 6" in texts(driver, ".run")[0])
            assert browser.execute_script("return document.querySelector('#curves input[type=checkbox]').checked")
            assert {*map(tuple, shown_steps(browser))} == {(2, 5)}
            assert browser.execute_script("return [window.scrollY, [...state.pins]]") == [300, ["policy/clip_high"]]
            assert find(browser, "#query")[0].get_attribute("value") == "mean"
            assert "match" in find(browser, "#curves .count")[0].text
            assert find(browser, "#passk")[0].get_attribute("open") is None, "folded, as it was"
            assert pressed(browser) == ["base", "mine 7"], "the last is another one now"
            console, asked = logs(browser)
            expected = {url, f"{start}data.json?{query}", f"{start}favicon.ico"}
            assert console == [] and set(asked) <= expected
            server.send_signal(signal.SIGINT)
            out, errors = server.communicate(timeout=HANG_S)
        finally:
            server.kill()
    assert server.returncode == 130 and errors.count("\n") == 1 and out == "", errors
