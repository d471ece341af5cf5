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
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait
from waiting import HANG_S

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "reporting" / "report"))

from page_runs import EVIL, make_run, result

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


@pytest.fixture
def page(browser: webdriver.Chrome, runs: Path) -> webdriver.Chrome:
    logs(browser)
    browser.get(write_report([runs / "a", runs / "b"], None).as_uri())
    return browser


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
    marks = "polyline, path.curve, rect, td.cell"
    empty = [name for name, figure in drawn.items() if not figure.find_elements(By.CSS_SELECTOR, marks)]
    assert empty == []
    assert "pass@8" in find(page, ".words")[0].text
    assert find(page, "[data-figure='reward/mean'] line.mark")
    assert len(find(page, "#settings tr")) == 3


def test_numbers_of_every_chart_can_be_read(page: webdriver.Chrome) -> None:
    script = """return [...document.querySelectorAll('figure svg')].map((one) =>
        parseFloat(getComputedStyle(one.querySelector('text')).fontSize) * one.getBoundingClientRect().width / 420)"""
    sizes = page.execute_script(script)
    assert min(sizes) > 10.5 and max(sizes) < 1.5 * min(sizes)


def test_both_ends_of_a_histogram_are_named(page: webdriver.Chrome) -> None:
    for source in ("evaluation: dev", "training: groups of responses"):
        names = page.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)",
            f"[data-figure='success {source}'] svg text[text-anchor='middle']",
        )
        assert (names[0], names[-2], names[-1]) == ("0", "1", "share correct")


def test_runs_that_coincide_are_both_seen(page: webdriver.Chrome) -> None:
    lines = find(page, "[data-figure='reward/mean'] polyline.curve")
    assert [line.get_attribute("stroke-dasharray") for line in lines] == [None, "6 4"]
    bands = find(page, "[data-figure='pass@k dev'] polygon.band")
    assert bands and all(band.get_attribute("stroke") == band.get_attribute("fill") for band in bands)


def test_values_are_shown_under_the_cursor(page: webdriver.Chrome) -> None:
    chart = find(page, "[data-figure='reward/mean'] svg")[0]
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    webdriver.ActionChains(page).move_to_element(chart).perform()
    hint = find(page, "#tip")[0]
    assert hint.is_displayed() and hint.text.startswith("step 3") and "0.3" in hint.text


def test_runs_scales_and_models_can_be_chosen(page: webdriver.Chrome) -> None:
    lines = "[data-figure='reward/mean'] polyline"
    before = [line.get_attribute("points") for line in find(page, lines)]
    assert len(before) == 2
    click(page, "#curves .chip", "b")
    assert len(find(page, lines)) == 1
    click(page, "#curves .chip", "b")
    click(page, "#curves label", "logarithmic")
    assert [line.get_attribute("points") for line in find(page, lines)] != before
    page.execute_script(
        "const s = document.querySelector('input[type=range]'); s.value = 0.3; s.dispatchEvent(new Event('change'))"
    )
    assert len(find(page, "[data-figure='reward/mean'] polyline.faint")) == 2
    click(page, "#passk .chip", "base")
    assert find(page, "[data-figure='candidates base']") == [], "a model is chosen for the whole page"
    click(page, "summary", "more figures")
    WebDriverWait(page, HANG_S).until(lambda driver: find(driver, "[data-figure='something/of_its_own'] polyline"))
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
    search = "const box = document.querySelector('input[type=search]'); box.value = arguments[0]; "
    page.execute_script(search + "box.dispatchEvent(new Event('input'))", EVIL[:20])
    assert count(page) == 48, "it is in every response's tokens"
    click(page, "#rollouts button", "clear filters")
    find(page, "input[type=search]")[0].click()
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
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
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
            click(browser, "#curves label", "logarithmic")
            assert texts(browser, "#passk .chip[aria-pressed=true]") == ["base", "mine 6"]
            save(result([1, 2, 3, 5], 8, 7), root / "evals" / "step_000007")
            with (root / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 7, "time": time.time(), "time/step": 2.0, "reward/mean": 0.7}) + "\n")
            WebDriverWait(browser, HANG_S).until(lambda driver: "step 7 of 6" in texts(driver, ".run")[0])
            assert browser.execute_script("return document.querySelector('#curves input[type=checkbox]').checked")
            shown = texts(browser, "#passk .chip[aria-pressed=true]")
            assert shown == ["base", "mine 7"], "the last is another one now"
            console, asked = logs(browser)
            expected = {url, f"{start}data.json?{query}", f"{start}favicon.ico"}
            assert console == [] and set(asked) <= expected
            server.send_signal(signal.SIGINT)
            out, errors = server.communicate(timeout=HANG_S)
        finally:
            server.kill()
    assert server.returncode == 130 and errors.count("\n") == 1 and out == "", errors
