"""The documentation as a site, built by MkDocs as `tools/docs` does, in a browser that opens it from the file system."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("material")
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
PHONE = {"width": 390, "height": 844}
DIAGRAMS = {"spool": "ring", "shipping": "shipping", "groups": "hand-over"}  # by page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site. Strict: a link without a target is an error."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("THE SITE IS NOT LOOKED AT HERE: that needs chromium (on Debian: sudo apt-get install chromium)")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    """A tab that fails the test on a request to another host, and on an error of a script."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    complaints: list[str] = []
    found = context.new_page()
    found.on("request", lambda request: None if request.url.startswith(("file:", "data:", "blob:")) else complaints.append(request.url))
    found.on("pageerror", lambda error: complaints.append(str(error)))
    yield found
    context.close()
    assert complaints == []


def address(site: Path, page: str) -> str:
    return (site / f"{page}.html").as_uri()


def width_of_scroll(tab: Page) -> int:
    return int(tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_the_site_has_the_api_the_help_of_commands_and_the_files_that_pages_link_to(site: Path) -> None:
    assert "Append one record" in (site / "api.html").read_text(encoding="utf-8")
    text = (site / "command-help.html").read_text(encoding="utf-8")
    assert "kvspool hub serve" in text and "--least-free" in text and "&lt;!-- help" not in text and "<!-- help" not in text
    assert "The path of a durable append" in (site / "HACKING.html").read_text(encoding="utf-8")
    assert {path.name for path in site.glob("*.html")} >= {"index.html", "CHANGELOG.html", "SECURITY.html", "start.html"}
    assert "unpkg.com" not in (site / "index.html").read_text(encoding="utf-8")


def test_no_page_has_marks_of_its_source(site: Path) -> None:
    """A block of code, a table or a heading that the generator doesn't know stays as it was written."""
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        shown = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert re.findall(r"```|\n\| |<p>#|\]\(\w", shown) == [], path.name


def test_search_finds_a_page_without_a_server(site: Path, tab: Page) -> None:
    tab.goto(address(site, "index"))
    tab.locator(".md-search__input").first.click()
    tab.keyboard.type("rendezvous hash", delay=10)
    found = tab.locator(".md-search-result__link")
    expect(found.first).to_be_visible(timeout=20_000)
    titles = found.locator("h1, h2").all_inner_texts()
    assert "Ship copies" in titles or "Shipping" in titles, titles
    found.first.click()
    expect(tab.locator("article h1")).to_be_visible()
    assert tab.url.startswith("file:") and "index.html" not in tab.url


def test_dark_mode_is_kept_on_other_pages(site: Path, tab: Page) -> None:
    tab.goto(address(site, "index"))
    expect(tab.locator("body")).to_have_attribute("data-md-color-scheme", "default")
    tab.locator("label[for=__palette_1]").click()
    expect(tab.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    tab.goto(address(site, "start"))
    expect(tab.locator("body")).to_have_attribute("data-md-color-scheme", "slate")


@pytest.mark.parametrize("page", ["index", "start", "spool", "errors", "spark-options", "guarantees", "format", "command-help", "api"])
def test_no_page_scrolls_sideways_on_a_phone(site: Path, tab: Page, page: str) -> None:
    tab.set_viewport_size(PHONE)
    tab.goto(address(site, page))
    assert width_of_scroll(tab) <= 0


@pytest.mark.parametrize("page", DIAGRAMS)
def test_each_diagram_is_loaded_and_fits_on_a_phone(site: Path, tab: Page, page: str) -> None:
    tab.set_viewport_size(PHONE)
    tab.goto(address(site, page))
    picture = tab.locator(f"article img[src$='diagrams/{DIAGRAMS[page]}.svg']")
    expect(picture).to_be_visible()
    width, shown = picture.evaluate("image => [image.naturalWidth, image.clientWidth]")
    assert width > 300 and 300 < shown <= PHONE["width"]
    assert picture.get_attribute("alt")
