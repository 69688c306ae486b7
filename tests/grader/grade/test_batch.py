import shutil
from dataclasses import replace

import filelock
import psutil
import pytest
from typer.testing import CliRunner

from grader.grade import batch, sandbox
from grader.grade.batch import grade_one
from grader.grade.results import NAME, CheckResult, SubmissionResult, read_results, write_result
from grader.grade.submissions import find_submissions
from labsupport.cli import app

RESULT = SubmissionResult("ada", "01", "a.ipynb", "0", checks=(CheckResult("c", "e", 2, "passed"),))


@pytest.fixture
def course(tmp_path, hand_in):
    """Two students who need a kernel, one who does not, one whose file is broken."""
    hand_in(student="ada")
    hand_in("def square(x):\n    return x * x", "def cube(x):\n    return 0", student="bob")
    hand_in("", "", student="eve")
    (tmp_path / "submissions" / "joe").mkdir()
    (tmp_path / "submissions" / "joe" / "01-Powers.ipynb").write_text("{")
    return tmp_path / "submissions"


@pytest.fixture
def run_batch(course, settings, tmp_path):
    def run(**options):
        chosen = options.pop("settings", settings)
        found = find_submissions(course, notebooks=settings.notebooks)
        return batch.run_batch(found, tmp_path / "out", chosen, **options)

    return run


@pytest.fixture
def grade_command(course, solved_folder, tmp_path):
    """Run `labsupport grade` on those whose file is broken: they need no kernel."""

    def run(*words, out=tmp_path / "out"):
        for student in ("ada", "bob", "eve"):
            shutil.rmtree(course / student, ignore_errors=True)
        given = ["grade", course, "--out", out, "--notebooks", solved_folder, *words]
        return CliRunner().invoke(app, [str(word) for word in given])

    return run


def points(results):
    return {result.student: result.earned for result in results}


@pytest.mark.slow
def test_everybody_is_graded_and_a_second_run_grades_nobody_again(run_batch):
    told = []
    results = run_batch(tell=lambda result, done: told.append(done))
    again = run_batch(resume=True, tell=lambda result, done: told.append("again"))

    assert points(results) == {"ada": 5, "bob": 3, "eve": 0, "joe": 0}
    assert [result.points for result in results] == [5, 5, 5, 5]
    assert told == [1, 2, 3, 4]
    assert again == results


def test_results_of_an_earlier_run_are_not_mixed_in_by_accident(run_batch, tmp_path):
    (tmp_path / "out").mkdir()
    write_result(tmp_path / "out", RESULT)

    with pytest.raises(ValueError, match="--resume"):
        run_batch()


def test_two_graders_do_not_share_a_folder(run_batch, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "_LOCK_S", 0.1)
    (tmp_path / "out").mkdir()
    with (
        filelock.FileLock(tmp_path / "out" / ".lock"),
        pytest.raises(RuntimeError, match="another grader"),
    ):
        run_batch()


def test_results_do_not_go_into_the_folder_of_submissions(grade_command, course):
    assert "choose another" in str(grade_command(out=course / "out").exception)


def test_where_nothing_may_be_run_nothing_is_written(course, solved_folder, tmp_path, monkeypatch):
    for cached in (sandbox.wall_missing, sandbox.confinement_missing):
        cached.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no bubblewrap
    words = ["grade", course, "--out", tmp_path / "out", "--notebooks", solved_folder]
    said = CliRunner().invoke(app, [str(word) for word in words])

    assert "trusted submissions only" in str(said.exception)
    assert not (tmp_path / "out").exists()
    sandbox.wall_missing.cache_clear()


def test_one_students_folder_is_not_taken_for_a_class_unnoticed(grade_command):
    assert "One student, joe. For a class, name the folder of all" in grade_command().output


def test_a_line_that_was_cut_off_costs_that_line_only(tmp_path):
    write_result(tmp_path, RESULT)
    written = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(written + written[:40])
    write_result(tmp_path, RESULT)
    write_result(tmp_path, RESULT)

    assert read_results(tmp_path) == [RESULT] * 3


def test_after_an_interruption_there_are_reports_of_what_is_done(
    grade_command, tmp_path, monkeypatch
):
    def write_and_stop(out, result):
        write_result(out, result)
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "write_result", write_and_stop)
    said = grade_command("--unconfined")

    assert said.exit_code == 130
    assert "1 are done" in said.output
    assert "joe" in (tmp_path / "out" / "grades.csv").read_text()


@pytest.mark.parametrize("reason", ["format \ud800", "format \x1b]0;owned\x07\x1b[2J"])
def test_a_reason_that_no_terminal_takes_costs_nobody_the_reports(
    grade_command, course, tmp_path, settings, reason
):
    found = find_submissions(course, notebooks=settings.notebooks)
    (tmp_path / "out").mkdir()
    write_result(tmp_path / "out", grade_one(replace(found[-1], refused=reason), settings))

    said = grade_command("--resume")

    assert said.exit_code == 0, said.output
    assert "joe" in (tmp_path / "out" / "points.csv").read_text()
    assert "joe" in said.output
    assert all(line.isprintable() for line in said.output.splitlines())


@pytest.mark.slow
def test_what_the_system_killed_is_graded_once_more_alone(run_batch, tmp_path, settings, hand_in):
    hand_in("import os\ndef square(x):\n    os.kill(os.getpid(), 9)", student="ada")

    results = run_batch(settings=replace(settings, jobs=2))

    assert points(results) == {"ada": 2, "bob": 3, "eve": 0, "joe": 0}
    assert "was killed" in results[0].checks[0].message
    assert (tmp_path / "out" / NAME).read_text().count('"ada"') == 1


@pytest.mark.slow
def test_a_worker_that_dies_between_two_submissions_costs_nobody_a_point(run_batch):
    killed = []

    def kill_the_workers(result, done):
        for child in psutil.Process().children():
            if not killed and "spawn_main" in " ".join(child.cmdline()):
                child.kill()
                killed.append(child)

    results = run_batch(tell=kill_the_workers)

    assert points(results) == {"ada": 5, "bob": 3, "eve": 0, "joe": 0}
    assert killed


@pytest.mark.slow
def test_a_submission_on_which_the_grader_fails_stops_no_batch(settings, hand_in, tmp_path):
    unknown = replace(hand_in(), student="eve", notebook="99-Unknown")
    ada, eve = batch.run_batch([hand_in(), unknown], tmp_path / "out", settings)

    assert ada.earned == 5
    assert [(flag.kind, "KeyError: '99-Unknown'" in flag.text) for flag in eve.flags] == [
        ("not graded", True)
    ]
