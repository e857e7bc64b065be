"""A headless Chromium under playwright: the system's own, at $CHROMIUM or under a usual name."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright drives the browser: pip install playwright"
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")


@contextlib.contextmanager
def browser() -> Iterator["playwright.Browser"]:
    found = [shutil.which(name) for name in NAMES if shutil.which(name)]
    program = os.environ.get("CHROMIUM") or next(iter(found), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium, or set CHROMIUM")
    with playwright.sync_playwright() as driver:
        own = driver.chromium.launch(executable_path=program)
        yield own
        own.close()


class Tab:
    """A tab. Errors and warnings on the page, and the addresses that it asks for, are kept."""

    def __init__(self, browser: "playwright.Browser"):
        self.page = browser.new_page()
        self.errors = []
        self.requests = []
        self.page.on("pageerror", lambda error: self.errors.append(error))
        self.page.on("console", self.note)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.run = self.page.evaluate  # the value of an expression, awaited if it is a promise

    def note(self, message: "playwright.ConsoleMessage") -> None:
        if message.type in ("error", "assert", "warning"):
            self.errors.append(message.text)

    def open(self, path: Path, width: int) -> None:
        """A file from the disk, in a window of this width."""
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.goto(path.resolve().as_uri())
