"""Take the pictures of docs/how-to/read-the-report.md: `python tools/report_pictures.py [RUN RUN]`.

Without runs it trains two of the quickstart's, GRPO with and without CaSP, for 60 steps each (some minutes). The page
of both is opened in a headless Chromium at two widths, and the pictures are written to docs/images/.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headless import chromium, opened
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By

from megasharp.cli.report import write_report

REPOSITORY = Path(__file__).resolve().parents[1]
IMAGES = REPOSITORY / "docs" / "images"
RECIPES = {"mine": "[grpo]", "casp": "[grpo,casp]"}
COLOURS = 128
WIDE, PHONE = (1280, 1080), (390, 844)
SEARCH, ZOOM = "token entropy", "[10, 50]"


def train(folder: Path) -> list[Path]:
    """Train the two runs below `folder`."""
    for name, methods in RECIPES.items():
        options = (f"name={name}", f"recipe.methods={methods}", "steps=60", "eval.every=20")
        run_file = REPOSITORY / "examples" / "quickstart" / "run.yaml"
        command = [sys.executable, "-m", "megasharp.cli", "train", str(run_file), *options, "--runs", str(folder)]
        subprocess.run(command, check=True)
    return [folder / name for name in RECIPES]


def take(page: str) -> None:
    """Take all pictures of a page."""
    with chromium(*WIDE) as driver:
        opened(driver, page)
        save(driver, "report-desktop")
        show(driver, "#passk")
        save(driver, "report-candidates")
        driver.execute_script("state.stored.verdict = 'changed'; redraw('stored')")
        show(driver, "#stored")
        save(driver, "report-samples")
        driver.find_element(By.ID, "query").send_keys(SEARCH)
        driver.execute_script(f"zoom('step', {ZOOM})")
        show(driver, "#curves")
        area = driver.find_element(By.CSS_SELECTOR, "[data-figure='entropy/policy'] .u-over")
        webdriver.ActionChains(driver).move_to_element(area).perform()
        save(driver, "report-search", height=640)
    with chromium(*PHONE, mobile=True) as driver:
        opened(driver, page)
        driver.execute_script("unfold('curves'); document.querySelector('#curves .group > summary').click()")
        show(driver, "#nav")
        save(driver, "report-phone")


def show(driver: webdriver.Chrome, css: str) -> None:
    """Scroll to an element, and wait until what came into view is drawn."""
    driver.execute_script("document.querySelector(arguments[0]).scrollIntoView()", css)
    drawn = "const done = arguments[0]; setTimeout(() => requestAnimationFrame(done), 300)"
    driver.execute_async_script(drawn)


def save(driver: webdriver.Chrome, name: str, height: int | None = None) -> None:
    """Write what the window shows to docs/images, or the upper `height` CSS pixels of it, in 128 colours."""
    picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    if height is not None:
        picture = picture.crop((0, 0, picture.width, height))
    path = IMAGES / f"{name}.png"
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"picture: {path.relative_to(REPOSITORY)}, {path.stat().st_size / 1000:.0f} kB")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs; two of the quickstart are trained without")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        runs = given.runs or train(Path(temporary))
        take(write_report(runs, Path(temporary) / "page.html").as_uri())


if __name__ == "__main__":
    main()
