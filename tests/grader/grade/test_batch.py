import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import filelock
import psutil
import pytest
from typer.testing import CliRunner

from grader.grade import batch, sandbox
from grader.grade.batch import run_batch
from grader.grade.journal import NAME, Journal, read_results
from grader.grade.one import grade_one
from grader.grade.results import CheckResult, SubmissionResult
from grader.grade.settings import Settings
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


def points(results):
    return {result.student: result.earned for result in results}


@pytest.mark.slow
def test_everybody_is_graded_and_a_second_run_grades_nobody_again(course, tmp_path, settings):
    told = []
    results = run_batch(
        course, tmp_path / "out", settings, tell=lambda *args: told.append(args[1:])
    )
    again = run_batch(
        course, tmp_path / "out", settings, resume=True, tell=lambda *args: told.append("again")
    )

    assert points(results) == {"ada": 5, "bob": 3, "eve": 0, "joe": 0}
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert again == results


def test_results_of_an_earlier_run_are_not_mixed_in_by_accident(course, tmp_path, settings):
    (tmp_path / "out").mkdir()
    Journal(tmp_path / "out").add(RESULT)

    with pytest.raises(ValueError, match="--resume"):
        run_batch(course, tmp_path / "out", settings)


def test_two_graders_do_not_share_a_folder(course, tmp_path, settings, monkeypatch):
    monkeypatch.setattr(batch, "_LOCK_S", 0.1)
    (tmp_path / "out").mkdir()
    with (
        filelock.FileLock(tmp_path / "out" / ".lock"),
        pytest.raises(RuntimeError, match="another grader"),
    ):
        run_batch(course, tmp_path / "out", settings)


def test_results_do_not_go_into_the_folder_of_submissions(course, settings):
    with pytest.raises(ValueError, match="choose another"):
        run_batch(course, course / "out", settings)


def test_where_nothing_may_be_run_nothing_is_written(course, tmp_path, settings, monkeypatch):
    sandbox.wall_missing.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no bubblewrap
    with pytest.raises(RuntimeError, match="submissions would run as"):
        run_batch(course, tmp_path / "out", replace(settings, unconfined=False))

    assert read_results(tmp_path / "out") == []
    sandbox.wall_missing.cache_clear()


def test_a_line_that_was_cut_off_costs_that_line_only(tmp_path):
    journal = Journal(tmp_path)
    journal.add(RESULT)
    journal.close()
    with (tmp_path / NAME).open("ab") as file:
        file.write(RESULT.to_json().encode()[:40])

    journal = Journal(tmp_path)
    journal.add(RESULT)
    journal.close()

    assert read_results(tmp_path) == [RESULT, RESULT]


@pytest.mark.slow
def test_a_grader_that_is_killed_is_resumed_and_leaves_no_process(course, tmp_path, settings):
    out, mark = tmp_path / "out", f"mark-{time.monotonic_ns()}"
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from grader.grade.batch import run_batch\n"
        "from grader.grade.settings import Settings\n"
        "if __name__ == '__main__':\n"
        "    settings = Settings(notebooks=Path(sys.argv[3]), jobs=2, unconfined=True)\n"
        "    run_batch(Path(sys.argv[1]), Path(sys.argv[2]), settings)\n"
    )
    program = tmp_path / "grade.py"
    program.write_text(code)
    process = subprocess.Popen(
        [sys.executable, program, course, out, settings.notebooks],
        env={**os.environ, "TMPDIR": str(tmp_path), "MARK": mark},
    )
    # The broken file is written first; then the kernels are on their way.
    while len(read_results(out)) < 1 or not list(tmp_path.glob("labsupport-run-*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = (out / NAME).read_text()

    results = run_batch(course, out, settings, resume=True)

    lines = (out / NAME).read_text()
    assert lines.startswith(before)
    students = [json.loads(line)["student"] for line in lines.splitlines()]
    assert sorted(students) == ["ada", "bob", "eve", "joe"]
    assert points(results) == {"ada": 5, "bob": 3, "eve": 0, "joe": 0}


def test_after_an_interruption_there_are_reports_of_what_is_done(
    course, tmp_path, solved_folder, monkeypatch
):
    def add_and_stop(journal, result):
        add(journal, result)
        raise KeyboardInterrupt

    add = Journal.add
    monkeypatch.setattr(Journal, "add", add_and_stop)
    out = tmp_path / "out"
    told = ["grade", course, "--out", out, "--notebooks", solved_folder, "--unconfined"]
    said = CliRunner().invoke(app, [str(word) for word in told])

    assert said.exit_code == 130
    assert "1 are done" in said.output
    assert "joe" in (out / "grades.csv").read_text()  # the broken file, which needs no kernel


def test_of_one_notebook_also_those_are_reported_whose_file_does_not_tell(
    course, tmp_path, settings
):
    for student in ("ada", "bob", "eve"):
        shutil.rmtree(course / student)
    (course / "joe" / "01-Powers.ipynb").rename(course / "joe" / "01.ipynb")
    (course / "-rf").mkdir()
    (course / "-rf" / "02-Others.ipynb").touch()

    results = run_batch(course, tmp_path / "out", replace(settings, only="01"))

    assert [(one.student, one.status) for one in results] == [
        ("-rf", "refused"),
        ("joe", "refused"),
    ]
    with pytest.raises(ValueError, match="no submission of 02"):
        run_batch(course, tmp_path / "other", replace(settings, only="02"))


@pytest.mark.parametrize("reason", ["format \ud800", "format \x1b]0;owned\x07\x1b[2J"])
def test_a_reason_that_no_terminal_takes_costs_nobody_the_reports(
    course, tmp_path, solved_folder, reason
):
    for student in ("ada", "bob", "eve"):
        shutil.rmtree(course / student)
    (refused,) = find_submissions(course, notebooks=solved_folder)
    (tmp_path / "out").mkdir()
    earlier = grade_one(replace(refused, reason=reason), Settings(notebooks=solved_folder))
    Journal(tmp_path / "out").add(earlier)

    told = ["grade", course, "--out", tmp_path / "out", "--notebooks", solved_folder, "--resume"]
    said = CliRunner().invoke(app, [str(word) for word in told])

    assert said.exit_code == 0, said.output
    assert "joe" in (tmp_path / "out" / "points.csv").read_text()
    assert "joe" in said.output
    assert all(line.isprintable() for line in said.output.splitlines())


@pytest.mark.slow
def test_what_the_system_killed_is_graded_once_more_alone(course, tmp_path, settings, hand_in):
    hand_in("import os\ndef square(x):\n    os.kill(os.getpid(), 9)", student="ada")

    results = run_batch(course, tmp_path / "out", replace(settings, jobs=2))

    assert points(results) == {"ada": 2, "bob": 3, "eve": 0, "joe": 0}
    assert "was killed" in results[0].checks[0].message
    assert (tmp_path / "out" / NAME).read_text().count('"ada"') == 1


@pytest.mark.slow
def test_a_worker_that_dies_between_two_submissions_costs_nobody_a_point(
    course, tmp_path, settings
):
    killed = []

    def kill_the_workers(result, done, total):
        for child in psutil.Process().children():
            if not killed and "spawn_main" in " ".join(child.cmdline()):
                child.kill()
                killed.append(child)

    results = run_batch(course, tmp_path / "out", settings, tell=kill_the_workers)

    assert points(results) == {"ada": 5, "bob": 3, "eve": 0, "joe": 0}
    assert killed
