"""The golden path: a student goes through each notebook, wrong once in each exercise, then right.

Each run leaves pictures in build/golden-path, in the order in which the student saw them.
"""

import re

import nbformat
import pytest
from playwright.sync_api import expect

from labsupport import paths
from tests.nbgrader_course import solutions_of

pytestmark = pytest.mark.browser

NOTEBOOKS = sorted(paths.notebooks_dir().glob("*.ipynb"))
BARS = ".widget-hprogress"

# What a student writes first: a text of the solution, and another in its place.
WRONG = {
    "ex-1-1-textbook-attention": (" / math.sqrt(q.shape[-1])", ""),
    "ex-1-3-online-softmax": ("l * (m - shift).exp() + ", "l + "),
    "ex-1-4-tiled-forward": ("o * alpha[..., None] + p", "o + p"),
    "ex-1-6-half-precision": ("65_520", "1e9"),
    "ex-2-1-layout": ("x.transpose(1, 2)", "x.reshape(x.shape[0], x.shape[2], x.shape[1], -1)"),
    "ex-2-2-own-attention": (", softmax_scale=scaling", ""),
    "ex-2-3-decoding-mask": (".tril(seqlen_k - seqlen_q)", ".tril()"),
    "ex-2-6-cache": ("        self.length = end\n", ""),
    "ex-2-8-cause": ('7, "E"', '6, "A"'),
    "ex-3-1-rotary": ("first * cos - second * sin", "first * cos + second * sin"),
    "ex-3-2-chunked-loss": (" * kept).sum()", ").sum()"),
    "ex-3-4-merge": ("torch.logaddexp(lse, part_lse)", "torch.maximum(lse, part_lse)"),
    "ex-3-8-fault": ("(all_labels != -100).sum()", "len(all_labels)"),
    "ex-4-1-cost": ("10 if backward else 4", "8 if backward else 4"),
    "ex-4-3-kernel": ("l * alpha + tl", "l + tl"),
    "ex-4-6-fault": ('return "d"', 'return "a"'),
}


@pytest.fixture
def album(request, project, page):
    """Keep a numbered picture of the window, for a maintainer to leaf through."""
    folder = project / "build" / "golden-path" / request.node.callspec.id
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()

    def keep(name):
        number = len(list(folder.iterdir())) + 1
        page.screenshot(path=folder / f"{number:02}-{name}.png", animations="disabled")

    return keep


@pytest.fixture
def copy(lab, request):
    """The student's copy of a notebook, as it was when the test ends."""
    path = lab.work / request.getfixturevalue("path").name
    unsolved = path.read_bytes()
    yield nbformat.reads(unsolved.decode(), as_version=4)
    path.write_bytes(unsolved)
    lab.end_kernels()  # it knows the solutions


# The copy comes before the student, so that the window is closed before the copy is put back.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_student_gets_through(path, lab, copy, student, album, picture):
    solutions = solutions_of(nbformat.read(path, as_version=4))
    names = [cell.metadata.get("nbgrader", {}).get("grade_id") for cell in copy.cells]
    checks = [i for i, c in enumerate(copy.cells) if c.metadata.get("nbgrader", {}).get("grade")]
    exercises = {name[:6] for name in solutions}  # ex-1-1
    assert exercises == {name[:6] for name in solutions if name in WRONG}
    student.open(lab, path.name)
    album("opened")
    for cell in student.cells():
        exercise = names[cell.index]
        if exercise in WRONG:
            old, new = WRONG[exercise]
            assert old in solutions[exercise]
            student.write(cell, solutions[exercise].replace(old, new))
            student.run_one(cell)
            own = [i for i in checks if i > cell.index and names[i][:7] == exercise[:7]]
            # One of the checks of a wrong solution fails; those after it are not needed.
            for index in own:
                said = student.run_one(student.cells()[index], within=120).inner_text()
                if "Check failed" in said:
                    break
            assert "Check failed" in said, exercise
            assert "Traceback" not in said, exercise
            album(f"{exercise}-wrong")
            if exercise == "ex-1-1-textbook-attention":
                assert "The scores are not divided by sqrt(head_dim)" in said
                student.show(cell)
                picture("exercise")
        if exercise in solutions:
            student.write(cell, solutions[exercise])
        if cell.kind == "code":
            output = student.run_one(cell, within=300)
            if cell.index in checks:
                assert "[ok]" in output.inner_text(), exercise
                album(f"{exercise}-right")
    student.restart_and_run_all(within=600)
    cells = [cell for cell in student.cells() if cell.kind == "code" and cell.source]
    assert {cell.index: cell.errors() for cell in cells if cell.errors()} == {}
    assert [cell.count for cell in cells] == list(range(1, len(cells) + 1))
    progress = student.show(cells[-1]).locator(".jp-OutputArea")
    expect(progress).to_contain_text(re.compile(r"together +(\d+) of \1 points"))
    charts = [cell for cell in cells if any("image/png" in o.get("data", {}) for o in cell.outputs)]
    assert len(charts) >= 3
    for cell in charts:
        image = student.show(cell).locator(".jp-OutputArea img").first
        expect(image).to_be_visible()
        size = image.evaluate("async (i) => (await i.decode(), [i.naturalWidth, i.naturalHeight])")
        assert min(size) > 200
        album("chart")
    expect(student.page.locator(BARS)).to_have_count(0)
    assert "Error displaying widget" not in student.page.locator(".jp-Notebook").inner_text()
    if path == NOTEBOOKS[0]:
        student.show(student.find("plotting.plot_memory("))
        picture("chart")
        with student.running(student.find("table = run_grid("), within=300) as output:
            bar = output.locator(BARS).first
            expect(bar).to_be_visible()
            expect(output).to_contain_text(re.compile(r"[1-9]\d*/\d+"))
            cell = output.locator("xpath=ancestor::*[contains(@class, 'jp-CodeCell')][1]")
            picture("progress", cell)
        expect(output.locator("table")).to_be_visible()


def test_an_unsolved_notebook_stops_at_its_first_exercise_and_says_why(lab, student):
    page = student.open(lab, NOTEBOOKS[0].name).page
    # JupyterLab then shows the last cell, which has not run: the notebook must have said so.
    expect(page.locator(".jp-Notebook")).to_contain_text("scroll up to the red message")
    student.run_all(within=120)
    failed = [cell for cell in student.cells() if cell.kind == "code" and cell.errors()]
    # Requests that reach the kernel after the failure are run all the same: there may be others.
    assert failed[0].source.startswith("checks.check_textbook_values(textbook_attention)")
    assert student.cells()[-1].count is None
    message = student.show(failed[0]).locator(".jp-OutputArea-output")
    expect(message).to_be_in_viewport()
    expect(message).to_contain_text("replace `raise NotImplementedError`")
