"""A newer edition and a student's copy: the student's work stays, the lab's cells are renewed."""

import copy
import random

import nbformat
import pytest

from labsupport.course.merge import MergeError, merge, source_hashes, source_of


def cell(kind, name, source, **nbgrader):
    metadata = {"nbgrader": {"grade_id": name, **nbgrader}} if nbgrader else {}
    made = {"cell_type": kind, "id": name, "metadata": metadata, "source": source}
    return made | ({"outputs": [], "execution_count": None} if kind == "code" else {})


def edition(*cells, name="one"):
    about = {"edition": name, "cells": source_hashes(list(cells))}
    metadata = {"labsupport": about, "kernelspec": {"name": "python3", "display_name": "Python"}}
    return {"cells": list(cells), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def solution(name, source, kind="code"):
    return cell(kind, name, source, solution=True, grade=kind == "markdown")


def check(name, source):
    return cell("code", name, source, grade=True, solution=False, locked=True)


@pytest.fixture
def older():
    return edition(
        cell("markdown", "title", "# Squares"),
        cell("code", "guess", "predicted = None"),
        solution("ex-1-1-square", "def square(x):\n    raise NotImplementedError"),
        check("ex-1-1-square-values", "checks.square(square)"),
        solution("ex-1-2-why", "YOUR ANSWER HERE", kind="markdown"),
        cell("markdown", "end", "That is all."),
    )


@pytest.fixture
def newer(older):
    cells = copy.deepcopy(older["cells"])
    cells[0]["source"] = "# Squares, revised"
    cells[3]["source"] = "checks.square(square)\nchecks.square(square, seed=1)"
    cells.insert(1, cell("markdown", "added", "New in this edition."))
    return edition(*cells, name="two")


@pytest.fixture
def mine(older):
    return copy.deepcopy(older)


def sources(notebook):
    return [source_of(one) for one in notebook["cells"]]


def find(notebook, name):
    return next(one for one in notebook["cells"] if one["id"] == name)


def test_text_and_checks_of_the_lab_are_renewed(mine, newer):
    merged = merge(mine, newer).notebook
    assert sources(merged)[:2] == ["# Squares, revised", "New in this edition."]
    assert "seed=1" in find(merged, "ex-1-1-square-values")["source"]


def test_cells_of_the_students_own_stay_behind_the_cell_they_stood_behind(mine, newer):
    mine["cells"].insert(3, cell("code", "own-1", "square(5)"))
    mine["cells"].insert(0, cell("markdown", "own-0", "My notes"))
    mine["cells"].append(cell("code", "own-2", "square(6)"))
    merged = sources(merge(mine, newer).notebook)
    assert merged[0] == "My notes"
    assert merged[merged.index("square(5)") - 1].startswith("def square")
    assert merged[-1] == "square(6)"


def test_a_prediction_written_into_a_cell_of_the_lab_stays(mine, newer):
    find(mine, "guess")["source"] = "predicted = 12"
    merged = merge(mine, newer)
    assert find(merged.notebook, "guess")["source"] == "predicted = 12"
    assert merged.conflicts == ()


def test_a_changed_cell_that_the_newer_edition_changes_too_is_renewed_and_said(mine, newer):
    find(mine, "title")["source"] = "# My squares"
    merged = merge(mine, newer)
    assert sources(merged.notebook)[0] == "# Squares, revised"
    assert "'# My squares': you changed this cell" in merged.conflicts[0]


def test_an_edited_check_is_renewed_and_said_even_if_the_lab_did_not_change_it(mine, older):
    find(mine, "ex-1-1-square-values")["source"] = "pass"
    merged = merge(mine, {**older, "metadata": {**older["metadata"]}})
    assert find(merged.notebook, "ex-1-1-square-values")["source"] == "checks.square(square)"
    assert "the check ex-1-1-square-values" in merged.conflicts[0]


def test_an_exercise_that_vanished_stays_as_a_cell_that_is_not_graded(mine, newer):
    find(mine, "ex-1-1-square")["source"] = "def square(x):\n    return x * x"
    newer["cells"] = [c for c in newer["cells"] if not c["id"].startswith("ex-1-1")]
    merged = merge(mine, newer)
    kept = next(c for c in merged.notebook["cells"] if "x * x" in source_of(c))
    assert "nbgrader" not in kept["metadata"]
    assert "ex-1-1-square, which you had changed, is not in" in merged.conflicts[0]


def twice(mine, *texts):
    one = find(mine, "ex-1-1-square")
    mine["cells"][2:3] = [{**copy.deepcopy(one), "source": text} for text in texts]


STUB, WRITTEN = "def square(x):\n    raise NotImplementedError", "def square(x):\n    return x * x"


@pytest.mark.parametrize("texts", [(STUB, WRITTEN), (WRITTEN, STUB), (WRITTEN, STUB, STUB)])
def test_of_cells_with_one_id_the_written_one_counts(mine, newer, texts):
    twice(mine, *texts)
    merged = merge(mine, newer)
    assert [source for source in sources(merged.notebook) if "square(x)" in source] == [WRITTEN]
    assert merged.conflicts == ()


def test_of_two_written_cells_with_one_id_the_first_counts_and_the_other_stays(mine, newer):
    twice(mine, WRITTEN, WRITTEN + "  # or so")
    merged = merge(mine, newer)
    both = [one for one in merged.notebook["cells"] if "square(x)" in source_of(one)]
    assert [source_of(one) for one in both] == [WRITTEN, WRITTEN + "  # or so"]
    assert "nbgrader" not in both[1]["metadata"]
    assert "more than once" in merged.conflicts[0]


def test_a_solution_made_markdown_stays_behind_a_new_stub(mine, newer):
    find(mine, "ex-1-1-square").update(cell_type="markdown", source="I gave up because")
    merged = merge(mine, newer)
    assert "NotImplementedError" in find(merged.notebook, "ex-1-1-square")["source"]
    assert "I gave up because" in sources(merged.notebook)
    assert "is a markdown cell in your copy" in merged.conflicts[0]


def test_what_is_given_in_a_written_exercise_and_changed_is_said(mine, newer):
    find(mine, "ex-1-1-square")["source"] = "def square(x):\n    return x * x"
    find(newer, "ex-1-1-square")["source"] = "def square(x, y):\n    raise NotImplementedError"
    newer = edition(*newer["cells"], name="two")
    merged = merge(mine, newer)
    assert "x * x" in find(merged.notebook, "ex-1-1-square")["source"]
    assert "what is given in ex-1-1-square has changed" in merged.conflicts[0]


def test_an_editor_that_renames_all_cells_does_not_double_the_notebook(mine, newer):
    for number, one in enumerate(mine["cells"]):
        one["id"] = f"other{number}"
    merged = merge(mine, newer).notebook
    assert sources(merged) == sources(newer)


def test_an_edition_without_hashes_renews_and_says_what_differs(mine, newer):
    del mine["metadata"]["labsupport"]["cells"]
    find(mine, "guess")["source"] = "predicted = 12"
    mine["cells"].append(cell("code", "own", "square(6)"))
    merged = merge(mine, newer)
    assert sources(merged.notebook)[-1] == "square(6)"
    assert any("predicted = 12" in conflict for conflict in merged.conflicts)


def test_the_editors_own_metadata_stay_and_the_edition_is_the_newer_one(mine, newer):
    mine["metadata"]["colab"] = {"provenance": []}
    mine["metadata"]["kernelspec"] = {"name": "flash"}
    metadata = merge(mine, newer).notebook["metadata"]
    assert metadata["colab"] == {"provenance": []}
    assert metadata["kernelspec"]["name"] == "flash"
    assert metadata["labsupport"]["edition"] == "two"


@pytest.mark.parametrize(
    "file",
    [None, [], {}, {"cells": 3, "nbformat": 4}, {"cells": [1], "nbformat": 4}]
    + [{"cells": [], "nbformat": 3}, {"cells": [{"source": 5}], "nbformat": 4}]
    + [{"cells": [{"source": [5]}], "nbformat": 4}],
)
def test_what_is_no_notebook_of_format_4_is_refused(file, newer):
    with pytest.raises(MergeError, match="not a notebook of format 4"):
        merge(file, newer)


# --- whatever a student did -----------------------------------------------------------------------


def lived_in(mine, draw):
    """A copy after a term: cells written, added, deleted, moved, doubled, retyped, renamed."""
    cells = mine["cells"]
    for number in range(draw.randint(0, 12)):
        place = draw.randrange(len(cells)) if cells else 0
        one = cells[place] if cells else None
        line = f"written = {draw.randrange(10**9)}"
        act = draw.choice(("write", "add", "delete", "move", "double", "retype", "rename", "strip"))
        if act == "add" or one is None:
            cells.insert(place, cell(draw.choice(("code", "markdown")), f"own-{number}", line))
        elif act == "write":
            one["source"] = source_of(one) + "\n" + line
        elif act == "delete":
            del cells[place]
        elif act == "move":
            cells.insert(draw.randrange(len(cells)), cells.pop(place))
        elif act == "double":
            cells.insert(place, copy.deepcopy(one))
        elif act == "retype":
            new = cell("markdown", one["id"], one["source"])
            cells[place] = {**new, "metadata": one["metadata"]}
        elif act == "rename":
            one["id"] = f"renamed-{number}"
        else:
            one.pop("metadata" if draw.random() < 0.3 else "outputs", None)
            one.setdefault("metadata", {})
    return mine


def moved_on(older, draw):
    """The lab's next edition: texts changed, cells added, removed and moved."""
    cells = copy.deepcopy(older["cells"])
    for number in range(draw.randint(1, 5)):
        place = draw.randrange(len(cells)) if cells else 0
        act = draw.choice(("change", "add", "remove", "move")) if cells else "add"
        if act == "change":
            cells[place]["source"] += f"\nrevised {number}"
        elif act == "add":
            cells.insert(place, cell("markdown", f"new-{number}", f"New: {number}"))
        elif act == "remove":
            del cells[place]
        else:
            cells.insert(draw.randrange(len(cells)), cells.pop(place))
    return edition(*cells, name=f"next {draw.random()}")


def lines_of(notebook):
    return {line for source in sources(notebook) for line in source.split("\n") if line.strip()}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_student_did_no_work_is_lost_and_the_lab_is_whole(older, seed):
    draw = random.Random(seed)
    mine, newer = lived_in(copy.deepcopy(older), draw), moved_on(older, draw)
    merged = merge(mine, newer)
    result = merged.notebook
    for one in result["cells"]:
        one.setdefault("metadata", {})
        if one["cell_type"] == "code":
            one.setdefault("outputs", [])
            one.setdefault("execution_count", None)
    nbformat.validate(nbformat.from_dict(result))
    # The lab's cells are all there, in its order; its checks are its own.
    ids = [one["id"] for one in result["cells"]]
    wanted = [one["id"] for one in newer["cells"]]
    assert [name for name in ids if name in wanted] == wanted
    for one in newer["cells"]:
        if one["metadata"].get("nbgrader", {}).get("locked"):
            assert source_of(find(result, one["id"])) == one["source"]
    # What the student wrote is in the notebook, or said to be in the file saved before.
    lost = {line for line in lines_of(mine) - lines_of(result) if line.startswith("written")}
    said_so = sum("you changed this cell" in said or "twice" in said for said in merged.conflicts)
    said_so += sum("which you had changed" in said for said in merged.conflicts)
    assert not lost or said_so
    assert merge(result, newer).notebook["cells"] == result["cells"]
