"""One browser for all tests of this folder, which are skipped where it or playwright is missing."""

import pytest


@pytest.fixture(scope="session")
def browser():
    import chromium  # not installed with the README's line

    with chromium.browser() as own:
        yield own
