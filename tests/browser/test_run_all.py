"""Run All, as students press it: on a notebook that is solved, and on one that is not."""

import re

import nbformat
import pytest
from playwright.sync_api import expect

from labsupport import paths
from tests.nbgrader_course import solutions_of

pytestmark = pytest.mark.browser

NAME = "01-Setup_and_Comparison.ipynb"
BARS = ".widget-hprogress"


@pytest.fixture
def solved_copy(lab):
    """The student's copy of notebook 1 with every exercise solved, until the test ends."""
    solutions = solutions_of(nbformat.read(paths.notebooks_dir() / NAME, as_version=4))
    path = lab.work / NAME
    unsolved = path.read_bytes()
    copy = nbformat.read(path, as_version=4)
    for cell in copy.cells:
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        cell.source = solutions.get(name, cell.source)
    nbformat.write(copy, path)
    yield NAME
    path.write_bytes(unsolved)
    lab.end_kernels()  # it knows the solutions


# The copy comes before the student, so that the window is closed before the copy is put back.
def test_a_solved_notebook_runs_from_top_to_bottom(lab, solved_copy, student, picture):
    page = student.open(lab, solved_copy).page
    student.run_all(within=600)

    cells = [cell for cell in student.cells() if cell.kind == "code"]
    assert {cell.index: cell.errors() for cell in cells if cell.errors()} == {}
    counts = [cell.count for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    progress = student.show(cells[-1]).locator(".jp-OutputArea")
    expect(progress).to_contain_text(re.compile(r"together +(\d+) of \1 points"))

    charts = [cell for cell in cells if any("image/png" in o.get("data", {}) for o in cell.outputs)]
    assert len(charts) >= 5
    for cell in charts:
        image = student.show(cell).locator(".jp-OutputArea img")
        expect(image).to_be_visible()
        size = image.evaluate("async (i) => (await i.decode(), [i.naturalWidth, i.naturalHeight])")
        assert min(size) > 300
    student.show(student.find("plotting.plot_memory("))
    picture("chart")

    # Bars are there while something is measured, and go when it is done.
    expect(page.locator(BARS)).to_have_count(0)
    measuring = student.find("table = run_grid(")
    with student.running(measuring, within=300) as output:
        bar = output.locator(BARS).first
        expect(bar).to_be_visible()
        expect(output).to_contain_text(re.compile(r"[1-9]\d*/\d+"))
        picture("progress", output.locator("xpath=ancestor::*[contains(@class, 'jp-CodeCell')][1]"))
    expect(page.locator(BARS)).to_have_count(0)
    expect(output.locator("table")).to_be_visible()
    assert "Error displaying widget" not in page.locator(".jp-Notebook").inner_text()


def test_an_unsolved_notebook_stops_at_its_first_exercise_and_says_why(lab, student):
    page = student.open(lab, NAME).page
    # JupyterLab then shows the last cell, which has not run: the notebook must have said so.
    expect(page.locator(".jp-Notebook")).to_contain_text("scroll up to the red message")
    student.run_all(within=120)
    failed = [cell for cell in student.cells() if cell.kind == "code" and cell.errors()]
    # Requests that reach the kernel after the failure are run all the same: there may be others.
    assert failed[0].source == "checks.check_textbook_values(textbook_attention)"
    assert student.cells()[-1].count is None
    message = student.show(failed[0]).locator(".jp-OutputArea-output")
    expect(message).to_be_in_viewport()
    expect(message).to_contain_text("replace `raise NotImplementedError`")
