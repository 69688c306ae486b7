"""The instructor's notebooks, graded as a student's: whoever solves everything gets all points."""

import json
import shutil

from grader.grade.batch import run_batch
from grader.grade.settings import Settings
from labsupport.paths import notebooks_dir


def test_the_solved_notebooks_get_all_points(tmp_path):
    ada, worth = tmp_path / "submissions" / "ada", {}
    ada.mkdir(parents=True)
    for notebook in notebooks_dir().glob("*.ipynb"):
        shutil.copy(notebook, ada)
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        roles = [cell["metadata"].get("nbgrader", {}) for cell in cells]
        worth[notebook.stem] = sum(role.get("points", 0) for role in roles)
    assert sorted(worth.values()) == [24, 24, 24, 28]

    # On a busy machine a check may take longer than a class's limits allow.
    settings = Settings(cell_timeout_s=300, notebook_timeout_s=600, jobs=2, unconfined=True)
    results = run_batch(ada.parent, tmp_path / "out", settings)

    said = {check.grade_id: check.message for result in results for check in result.checks}
    assert {name: text for name, text in said.items() if not text.startswith("[ok]")} == {}
    assert {result.notebook: result.earned for result in results} == worth
