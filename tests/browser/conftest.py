"""One headless Chromium for all tests of this folder, which are skipped where it or playwright is missing."""

import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")


@pytest.fixture(scope="session")
def browser():
    """The system's own, at $CHROMIUM or under a usual name."""
    install = "playwright drives the browser: pip install playwright"
    playwright = pytest.importorskip("playwright.sync_api", reason=install)
    found = [shutil.which(name) for name in NAMES if shutil.which(name)]
    program = os.environ.get("CHROMIUM") or next(iter(found), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium, or set CHROMIUM")
    with playwright.sync_playwright() as driver:
        own = driver.chromium.launch(executable_path=program)
        yield own
        own.close()
