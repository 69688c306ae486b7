"""A newer edition and a student's copy: the student's work stays, the lab's cells are renewed."""

import copy
import random

import nbformat
import pytest

from labsupport.course.merge import merge, source_hashes, source_of

STUB, WRITTEN = "def square(x):\n    raise NotImplementedError", "def square(x):\n    return x * x"


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
        solution("ex-1-1-square", STUB),
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


def test_the_labs_cells_are_renewed_and_the_students_stay_where_they_stood(mine, newer):
    find(mine, "guess")["source"] = "predicted = 12"
    mine["cells"].insert(3, cell("code", "own-1", "square(5)"))
    mine["cells"].insert(0, cell("markdown", "own-0", "My notes"))
    mine["cells"].append(cell("code", "own-2", "square(6)"))
    mine["metadata"] |= {"colab": {"provenance": []}, "kernelspec": {"name": "flash"}}
    merged, conflicts = (done := merge(mine, newer)).notebook, done.conflicts
    assert conflicts == ()
    texts = sources(merged)
    assert texts[:4] == ["My notes", "# Squares, revised", "New in this edition.", "predicted = 12"]
    assert texts[texts.index("square(5)") - 1] == STUB
    assert texts[-1] == "square(6)"
    assert "seed=1" in find(merged, "ex-1-1-square-values")["source"]
    # The editor's own metadata stay, and the edition is the newer one.
    assert merged["metadata"]["colab"] == {"provenance": []}
    assert merged["metadata"]["kernelspec"]["name"] == "flash"
    assert merged["metadata"]["labsupport"]["edition"] == "two"


def test_a_changed_cell_that_the_newer_edition_changes_too_is_renewed_and_said(mine, newer):
    find(mine, "title")["source"] = "# My squares"
    merged = merge(mine, newer)
    assert sources(merged.notebook)[0] == "# Squares, revised"
    assert "'# My squares': you changed this cell" in merged.conflicts[0]


def test_an_exercise_without_a_place_stays_as_a_cell_that_is_not_graded(mine, newer):
    find(mine, "ex-1-1-square")["source"] = WRITTEN
    without = copy.deepcopy(newer)
    without["cells"] = [c for c in newer["cells"] if not c["id"].startswith("ex-1-1")]
    retyped = copy.deepcopy(mine)
    find(retyped, "ex-1-1-square")["cell_type"] = "markdown"
    for merged in (merge(mine, without), merge(retyped, newer)):
        kept = next(c for c in merged.notebook["cells"] if source_of(c) == WRITTEN)
        assert "nbgrader" not in kept["metadata"]
        assert "cell ex-1-1-square: the newer edition has no place for" in merged.conflicts[0]
    assert "NotImplementedError" in find(merged.notebook, "ex-1-1-square")["source"]


def test_what_is_no_notebook_of_format_4_is_refused(newer):
    cells = 3, [1], [{"source": 5}], [{"source": [5]}]
    files = [{"cells": each, "nbformat": 4} for each in cells]
    for file in (None, [], {}, {"cells": [], "nbformat": 3}, *files):
        with pytest.raises(ValueError, match="not a notebook of format 4"):
            merge(file, newer)


# --- whatever a student did -----------------------------------------------------------------------


def lived_in(mine, draw):
    """A copy after a term: cells written, added, deleted, moved, doubled, retyped, renamed."""
    cells = mine["cells"]
    for number in range(draw.randint(0, 12)):
        place = draw.randrange(len(cells) + 1)
        one = cells[place] if place < len(cells) else None
        line = f"written = {draw.randrange(10**9)}"
        act = draw.choice(("write", "add", "delete", "move", "double", "retype", "rename"))
        if act == "add" or one is None:
            cells.insert(place, cell(draw.choice(("code", "markdown")), f"own-{number}", line))
        elif act == "write":
            one["source"] += "\n" + line
        elif act == "double":
            cells.insert(place, copy.deepcopy(one))
        elif act == "rename":
            one["id"] = f"renamed-{number}"
        elif act == "retype":
            cells[place] = cell("markdown", one["id"], one["source"]) | {
                "metadata": one["metadata"]
            }
        else:
            del cells[place]
            if act == "move":
                cells.insert(draw.randrange(len(cells) + 1), one)
    return mine


def moved_on(older, draw):
    """The lab's next edition: texts changed, cells added, removed and moved."""
    cells = copy.deepcopy(older["cells"])
    cells[draw.randrange(6)]["source"] += "\nrevised"
    cells.insert(draw.randrange(7), cell("markdown", "new", "New"))
    cells.insert(draw.randrange(7), cells.pop(draw.randrange(7)))
    del cells[draw.randrange(7)]
    return edition(*cells, name=f"next {draw.random()}")


def lines_of(notebook):
    return {line for source in sources(notebook) for line in source.split("\n") if line.strip()}


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_student_did_no_work_is_lost_and_the_lab_is_whole(older, seed):
    draw = random.Random(seed)
    mine, newer = lived_in(copy.deepcopy(older), draw), moved_on(older, draw)
    merged = merge(mine, newer)
    result = merged.notebook
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
    assert not lost or merged.conflicts
    assert merge(result, newer).notebook["cells"] == result["cells"]
