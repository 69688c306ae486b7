"""The four notebooks with their stored results, in a window of 1280 pixels: nothing is cut."""

import shutil
from pathlib import Path

import nbformat
import pytest

from labsupport import paths

pytestmark = pytest.mark.browser

NOTEBOOKS = paths.notebooks_in(paths.notebooks_dir())
MEASURE = Path(__file__).with_name("measure.js").read_text(encoding="utf-8")
# A chart that is shrunk further has letters that are hard to read.
SMALLEST = 0.75


@pytest.fixture(scope="module")
def solved(lab):
    """The notebooks with solutions and results, in a folder beside the student's copies."""
    folder = lab.work / "solved"
    folder.mkdir()
    for path in NOTEBOOKS:
        shutil.copy(path, folder)
    yield
    shutil.rmtree(folder)


def charts_in(path):
    return sum(
        "image/png" in output.get("data", {})
        for cell in nbformat.read(path, as_version=4).cells
        for output in cell.get("outputs", [])
    )


@pytest.mark.usefixtures("solved")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_text_code_table_or_chart_is_cut(path, lab, student):
    student.open(lab, f"solved/{path.name}")
    seen = student.page.evaluate(MEASURE)
    assert seen["cells"] == len(student.cells())
    assert not seen["found"], "\n".join(seen["found"])
    assert len(seen["pictures"]) == charts_in(path)
    assert seen["pictures"] or path.parent.name == "further"
    shrunk = [
        (cell, width) for cell, natural, width in seen["pictures"] if width < SMALLEST * natural
    ]
    assert not shrunk
