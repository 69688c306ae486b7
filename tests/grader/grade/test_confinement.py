"""What is kept from submissions, and when nothing is graded at all."""

import os
import sys
from pathlib import Path

import pytest

from grader.grade.confinement import (
    Confinement,
    _readable,
    confinement_here,
    prepare_folder,
    refuse_unconfined,
    remove_folder,
)
from grader.grade.settings import Settings

UNCONFINED = Confinement(False, None, ("Submissions run as root.",))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can grade as root")
def test_nothing_is_graded_as_root_unless_that_was_asked_for():
    with pytest.raises(RuntimeError, match=r"would run as root.*--unconfined"):
        refuse_unconfined(UNCONFINED, Settings())
    refuse_unconfined(UNCONFINED, Settings(unconfined=True))
    refuse_unconfined(UNCONFINED, Settings(unprivileged=False))
    refuse_unconfined(Confinement(True, 64_000), Settings())


def test_nothing_is_graded_with_all_rights_of_a_user_unless_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(RuntimeError, match=r"would run as you.*sudo.*--unconfined"):
        refuse_unconfined(UNCONFINED, Settings())
    refuse_unconfined(UNCONFINED, Settings(unconfined=True))
    refuse_unconfined(Confinement(True, None), Settings())


def test_what_is_missing_names_all_that_a_submission_can_do(settings):
    missing = " ".join(confinement_here(settings).missing)
    if not missing or os.getuid() == 0:
        pytest.skip("we can make namespaces, or are root")
    assert "read, change and delete your files, and end your programs" in missing


def shown():
    folder = prepare_folder()
    try:
        return [Path(path) for path in _readable(folder, folder / "given")]
    finally:
        remove_folder(folder)


def test_a_folder_on_the_path_is_not_shown_to_submissions(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert not any(tmp_path.is_relative_to(path) for path in shown())
    assert any(Path(sys.prefix).is_relative_to(path) for path in shown())


def test_a_project_that_is_an_environment_itself_is_not_shown_to_submissions(project, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(project))
    assert not any(project.is_relative_to(path) for path in shown())
