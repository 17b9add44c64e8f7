"""Pages in a real Chromium, which complains about nothing and loads nothing from elsewhere."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CELLS = """title => [...document.querySelectorAll(`table[data-title="${title}"] tr`)].map(
    row => [...row.cells].map(cell => cell.textContent))"""
"""The texts of a table, for `page.evaluate`."""


def program(name: str, package: str) -> str:
    """The path of a program; without it the test is skipped."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (apt-get install {package})")
    return path


@contextlib.contextmanager
def opened(url: str, **options: Any) -> Iterator[Any]:
    """A page that shows figures."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    asked: list[str] = []
    complaints: list[str] = []
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(
            executable_path=program("chromium", "chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(**options)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url, wait_until="domcontentloaded")
        page.wait_for_selector("body[data-at]", state="attached", timeout=60_000)
        yield page
        browser.close()
    assert not complaints
    assert all(one.startswith((url.removesuffix("report"), "data:")) for one in asked)
