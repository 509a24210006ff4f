"""Report and comparison in a real browser: nothing wrong in the console, readable for everybody, at any width."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.observe.compare import write_comparison
from megatron_tlt.observe.report import write_report
from tests.observe.synthetic import make_run

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium; as root on Debian: apt-get install chromium"),
]
PAGES = ("report", "watched report", "comparison")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    runs = [folder / name for name in ("first", "second", "watched")]
    for seed, run in enumerate(runs):
        make_run(run, seed=seed)
    report, watched = write_report(runs[0]), write_report(runs[2], refresh_s=600)
    return dict(zip(PAGES, (report, watched, write_comparison(runs[:2], folder / "compare.html")), strict=True))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("page_name", PAGES)
def test_a_page_is_whole(
    page_name: str, width: int, scheme: str, pages: dict[str, Path], browser: Any, tmp_path: Path
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda request: problems.append(request.url))
    page.goto(pages[page_name].as_uri())
    kept = Path(os.environ.get("TLT_SCREENSHOTS", tmp_path))
    kept.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=kept / f"{page_name.replace(' ', '-')}-{width}-{scheme}.png", full_page=True)
    assert problems == []
    drawn = page.eval_on_selector_all("figure svg", "all => all.map(one => one.getBoundingClientRect().width)")
    assert len(drawn) >= 6 and min(drawn) > 0.6 * min(width, 600), drawn
    paths = page.eval_on_selector_all("figure", "all => all.map(one => one.querySelectorAll('svg path').length)")
    assert min(paths) > 3, "every plot has lines or bars"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing reaches out of the page"
    found = Axe().run(page).response["violations"]
    serious = [
        f"{each['id']}: {each['nodes'][0]['html'][:120]}" for each in found if each["impact"] in ("serious", "critical")
    ]
    assert serious == []
    page.close()


def test_the_keyboard_opens_what_is_folded(pages: dict[str, Path], browser: Any) -> None:
    page = browser.new_page()
    page.goto(pages["report"].as_uri())
    folded = page.locator("details").count()
    assert folded > 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    before = page.evaluate("document.activeElement.parentElement.open")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.parentElement.open") is not before
    page.close()


def test_a_watched_report_loads_itself_again_until_stopped(
    pages: dict[str, Path], browser: Any, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    page = browser.new_page()
    loads: list[str] = []
    page.on("load", lambda loaded: loads.append(loaded.url))
    page.goto(write_report(run, refresh_s=3).as_uri())
    page.wait_for_event("load", timeout=60_000)  # by itself; right after it there is time to stop the next one
    page.locator("#stop").click()
    before = len(loads)
    assert before >= 2
    page.wait_for_timeout(4000)
    assert len(loads) == before
    page.goto(pages["report"].as_uri())
    assert page.locator("#stop").count() == 0
    page.close()
