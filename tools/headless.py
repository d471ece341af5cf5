"""A headless Chromium for tools: opened at a width, with the time at which its page was drawn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

from megasharp.common.errors import UserError

# Two frames after the page has loaded: what its scripts drew by then is on the screen.
_WATCH = """addEventListener("load", () => requestAnimationFrame(() => requestAnimationFrame(() => {
  window.drawnAfter = performance.now();
})));"""
_PATIENCE_S = 120


@contextmanager
def chromium(width: int, height: int, *, mobile: bool = False) -> Iterator[webdriver.Chrome]:
    """Open Chromium with a window of this size in CSS pixels. Raises UserError where there is none on PATH."""
    browser, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver_path is None:
        raise UserError("no chromium and chromedriver on PATH; .ci/packages installs them")
    options = Options()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if mobile else 1, "mobile": mobile}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
        yield driver
    finally:
        driver.quit()


def opened(driver: webdriver.Chrome, address: str) -> float:
    """Open a page; return the milliseconds from the start of the navigation to the second frame after it loaded."""
    driver.get(address)
    WebDriverWait(driver, _PATIENCE_S).until(lambda page: page.execute_script("return window.drawnAfter"))
    return float(driver.execute_script("return window.drawnAfter"))
