"""The first minute: what `make lab` shows to somebody who has never seen JupyterLab."""

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_the_printed_address_shows_the_notebooks_and_asks_nothing(lab, page, student, project):
    page.goto(lab.address)
    files = page.locator(".jp-DirListing-itemName")
    notebooks = sorted(path.name for path in (project / "notebooks").glob("*.ipynb"))
    expect(files).to_have_text(["further", "theory", *notebooks, "Checklist.md"])
    assert_nothing_asks(page)

    files.filter(has_text=notebooks[0]).dblclick()
    student.wait_until_open()
    assert_nothing_asks(page)
    heading = page.locator(".jp-NotebookPanel h1").first
    expect(heading).to_contain_text("Attention's memory bottleneck")
    assert all(not cell.outputs for cell in student.cells())


def test_a_click_on_a_chapter_shows_it_as_a_page(lab, page, student):
    student.open(lab, "01-Setup_and_Comparison.ipynb")
    page.get_by_role("link", name="2", exact=True).click()
    chapter = page.locator(".jp-MarkdownViewer")
    expect(chapter.locator("h1")).to_contain_text("Online softmax")
    # Mathematics is set, not shown as dollars.
    expect(chapter.locator("mjx-container").first).to_be_visible()


def assert_nothing_asks(page):
    """No dialog (which kernel?), no notification (news?)."""
    expect(page.locator(".jp-Dialog")).to_have_count(0)
    expect(page.locator(".Toastify__toast")).to_have_count(0)
