"""How far a student is: read off saved notebooks, and asked in a running kernel."""

import json

import pytest

from labsupport import checks, paths
from labsupport.course.progress import progress_of_folder, show_progress
from labsupport.course.start import start_work

OK = {"output_type": "stream", "name": "stdout", "text": ["[ok] squares\n"]}
NOT_WRITTEN = {
    "output_type": "error",
    "ename": "CheckFailed",
    "evalue": "square is not written yet: replace `raise NotImplementedError`.",
    "traceback": [],
}


@pytest.fixture
def copy(folder, tmp_path):
    return start_work(tmp_path / "work", folder).created[0]


def save(copy, outputs, source=None):
    """Save the notebook with these outputs of its check cell."""
    notebook = json.loads(copy.read_text())
    notebook["cells"][3]["outputs"] = outputs
    if source is not None:
        notebook["cells"][3]["source"] = source
    copy.write_text(json.dumps(notebook))


def said_of(copy):
    return "\n".join(progress_of_folder(copy.parent).lines())


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([OK], "1-1 square    2 of 2 points   1 of 1 checks\n"),
        ([], "1-1 square    0 of 2 points   0 of 1 checks   (not run)"),
        ([NOT_WRITTEN], "(not written)"),
        (
            [OK, {**NOT_WRITTEN, "evalue": "square is wrong."}],
            "0 of 2 points   0 of 1 checks   (not",
        ),
        ([{"output_type": "stream", "name": "stdout", "text": "hello"}], "(not run)"),
    ],
)
def test_a_check_counts_as_the_saved_notebook_shows_it(copy, outputs, said):
    save(copy, outputs)
    assert said in said_of(copy)


def test_a_check_that_the_student_changed_does_not_count(copy):
    save(copy, [OK], source="print('[ok] squares')")
    assert "0 of 2 points   0 of 1 checks   (check was changed)" in said_of(copy)


def test_files_saved_before_an_upgrade_and_notebooks_of_ones_own_are_not_counted(copy):
    save(copy, [OK])
    before = copy.with_name("01-Squares.older-edition-12345678.ipynb")
    before.write_text(copy.read_text())
    copy.with_name("own.ipynb").write_text('{"cells": [], "metadata": {}}')
    assert list(progress_of_folder(copy.parent).checks) == ["01-Squares"]


def test_a_notebook_that_cannot_be_read_is_named_and_the_others_are_shown(copy):
    save(copy, [OK])
    copy.with_name("02-Broken.ipynb").write_text("not json")
    said = said_of(copy)
    assert "02-Broken.ipynb: cannot be read" in said
    assert "2 of 2 points" in said


def test_a_folder_without_notebooks_of_the_lab_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no notebook of the lab"):
        progress_of_folder(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        progress_of_folder(tmp_path / "gone")


@pytest.fixture
def lab(folder, monkeypatch):
    monkeypatch.setattr(paths, "notebooks_dir", lambda: folder)


def right(x):
    return x * x


def only_for_positive_numbers(x):
    return x * abs(x)


def wrong(x):
    return x


def stub(x):
    raise checks.CheckFailed("square is not written yet: replace `raise NotImplementedError`.")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"square": right}, "2 of 2 points   1 of 1 checks\n"),
        # The hidden test would find it: what students see must not tell.
        ({"square": only_for_positive_numbers}, "2 of 2 points   1 of 1 checks\n"),
        ({"square": wrong}, "0 of 2 points   0 of 1 checks   (not passed)"),
        ({"square": stub}, "0 of 2 points   0 of 1 checks   (not written)"),
        ({}, "0 of 2 points   0 of 1 checks   (not run)"),
    ],
)
def test_in_a_kernel_the_checks_run_on_what_is_defined_there(lab, names, said, capsys):
    before = dict(names)
    show_progress("01", names)
    assert said in capsys.readouterr().out
    assert names == before


def test_without_the_project_a_kernel_says_so_and_goes_on(monkeypatch, capsys):
    def gone():
        raise paths.ProjectNotFoundError("installed as a copy")

    monkeypatch.setattr(paths, "notebooks_dir", gone)
    show_progress("01", {})
    assert "cannot be shown" in capsys.readouterr().out
