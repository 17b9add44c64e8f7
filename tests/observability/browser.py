"""Pages in a real Chromium, which complains about nothing and loads nothing from elsewhere."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
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
def browser() -> Iterator[Callable[..., Any]]:
    """What opens a page that shows figures: `opened(url, viewport=...)`."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    asked: list[tuple[str, str]] = []
    complaints: list[str] = []
    with playwright.sync_playwright() as player:
        chromium = player.chromium.launch(
            executable_path=program("chromium", "chromium"), args=["--no-sandbox"]
        )

        def opened(url: str, **options: Any) -> Any:
            page = chromium.new_page(**options)
            page.on("request", lambda request: asked.append((url, request.url)))
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.set_default_timeout(60_000)  # ms
            page.goto(url, wait_until="domcontentloaded")
            page.wait_for_selector("body[data-at]", state="attached")
            return page

        yield opened
        chromium.close()
    assert not complaints
    assert all(one.startswith((url.removesuffix("report"), "data:")) for url, one in asked)
