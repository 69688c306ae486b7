"""A headless Chromium for the tests in this folder; `make test-browser` provides it."""

import os

import pytest

# --no-sandbox: Chromium refuses to start as root otherwise, which one is in most containers. The
# rest keeps it from looking for updates: nothing here may depend on an outside network.
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def chromium():
    """The browser, as Playwright drives it."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or None
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()
