"""A small solved notebook, with everything in it that students must not get."""

import json

import nbformat
import pytest

SQUARE = '''def square(x):
    """Return x times x."""
    ### BEGIN SOLUTION
    product_of_x_with_itself = x * x
    return product_of_x_with_itself
    ### END SOLUTION'''
CHECK = """assert square(3) == 9
### BEGIN HIDDEN TESTS
assert square(-4) == 16, "the sign should vanish"
### END HIDDEN TESTS"""


def exercise_metadata(grade_id, **roles):
    roles = {"grade": False, "solution": False, "locked": False, **roles}
    return {"nbgrader": {"schema_version": 3, "grade_id": grade_id, **roles}}


@pytest.fixture
def solved():
    new = nbformat.v4
    cells = [
        new.new_markdown_cell("# Squares"),
        new.new_code_cell("print('given')", execution_count=1),
        new.new_code_cell(
            SQUARE,
            execution_count=2,
            metadata={**exercise_metadata("ex-1-1-square", solution=True), "note": "x * x"},
        ),
        new.new_code_cell(
            CHECK,
            execution_count=3,
            metadata=exercise_metadata("ex-1-1-square-check", grade=True, locked=True, points=2),
        ),
        new.new_markdown_cell(
            "Because minus times minus is plus.",
            metadata=exercise_metadata("ex-1-2-why", grade=True, solution=True, points=1),
            attachments={"drawing.png": {"image/png": "aGVsbG8="}},
        ),
    ]
    cells[1].outputs = [new.new_output("stream", name="stdout", text="given\n")]
    return new.new_notebook(cells=cells, metadata={"author": {"answers": "x * x"}})


@pytest.fixture
def folder(tmp_path, solved):
    """A folder that holds the solved notebook."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    nbformat.write(solved, folder / "01-Squares.ipynb")
    return folder


@pytest.fixture
def change(folder):
    """Edit a cell of the solved notebook on disk, as the lab's next version would."""

    def edit(index, source):
        path = folder / "01-Squares.ipynb"
        notebook = json.loads(path.read_text())
        notebook["cells"][index]["source"] = source
        path.write_text(json.dumps(notebook))

    return edit
