"""A headless Chromium, and the lab in it, as `make lab` serves it."""

import contextlib
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.browser.book_site import BOOK, served

# Playwright is installed by `make test-browser` only.
collect_ignore_glob = [] if find_spec("playwright") else ["test_*.py"]

# --no-sandbox: Chromium refuses to start as root otherwise, which one is in most containers. The
# rest keeps it from looking for updates: nothing here may depend on an outside network.
OPTIONS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
OPTIONS += " --disable-component-update --disable-sync"

# What many laptops and projectors show. The file browser takes a quarter of the width.
WINDOW = {"width": 1280, "height": 900}


def pytest_collection_modifyitems(items):
    """The longest file first, the book's many short tests last: then no worker is left with it."""
    if all(item.path.parent.name == "browser" for item in items):
        items.sort(key=lambda one: (one.path.name != "test_run_all.py", "book" in one.path.name))


def pytest_addoption(parser):
    parser.addoption(
        "--screenshots", action="store_true", help="draw the README's pictures of JupyterLab anew"
    )


@pytest.fixture(scope="session")
def chromium():
    """The browser, as Playwright drives it."""
    sync_api = pytest.importorskip("playwright.sync_api")
    sync_api.expect.set_options(timeout=20_000)  # milliseconds: a busy machine paints late
    with sync_api.sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or None
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS.split())
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """An empty window, without anything that an earlier test left in the browser."""
    context = chromium.new_context(viewport=WINDOW, reduced_motion="reduce")
    yield context.new_page()
    context.close()


@pytest.fixture(scope="session")
def make_lab(project, tmp_path_factory):
    """`make lab`, running until the last test of this folder has ended."""
    from tests.browser.server import MakeLab

    started = MakeLab(project, tmp_path_factory.mktemp("lab"))
    yield started
    started.end()


@pytest.fixture(scope="module")
def lab(make_lab):
    """The program that `make lab` started; its kernels (half a gigabyte each) end with the file."""
    yield make_lab
    make_lab.end_kernels()


@pytest.fixture
def student(page):
    """Somebody who sits in front of JupyterLab."""
    from tests.browser.student import Student

    return Student(page)


@pytest.fixture
def picture(request, project, page):
    """Keep a picture for the README, of the window or a part, where `--screenshots` asks for it."""

    def keep(name, part=page):
        if request.config.getoption("--screenshots"):
            page.mouse.move(0, 0)  # nothing is highlighted
            part.screenshot(path=project / "docs" / f"jupyterlab-{name}.png", animations="disabled")

    return keep


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that fails in a window leaves a picture of it, and says where."""
    report = yield
    window = getattr(item, "funcargs", {}).get("page")
    if report.when == "call" and report.failed and window is not None:
        path = Path(tempfile.mkdtemp(prefix="lab-browser-")) / "window.png"
        with contextlib.suppress(Exception):  # the browser itself may be what failed
            window.screenshot(path=path)
            report.sections.append(("browser", f"what {window.url} showed: {path}"))
    return report


@pytest.fixture(scope="session")
def site():
    assert (BOOK / "index.html").is_file(), "there is no book yet: make book"
    with served(BOOK) as address:
        yield address
