import os
import subprocess
from datetime import datetime

import pytest
import typer
from typer.testing import CliRunner

from grader.grade.collect import collect_command
from grader.grade.submissions import read_class, read_table


@pytest.fixture
def repository(tmp_path):
    """Make a repository whose only file changes at these times."""

    def make(name, *days):
        folder = tmp_path / name
        folder.mkdir()

        def git(*words, day="2026-11-01"):
            who = {"GIT_AUTHOR_DATE": f"{day} 12:00", "GIT_COMMITTER_DATE": f"{day} 12:00"}
            who |= {f"GIT_{one}_{key}": "x" for one in ("AUTHOR", "COMMITTER")
                    for key in ("NAME", "EMAIL")}  # fmt: skip
            subprocess.run(["git", "-C", folder, *words], check=True, env={**os.environ, **who})

        git("init", "--quiet")
        for day in days:
            (folder / "01.ipynb").write_text(day)
            git("add", ".")
            git("commit", "--quiet", "-m", day, day=day)
        return folder

    return make


def test_what_was_there_when_it_was_due_is_collected_and_the_rest_is_reported(tmp_path, repository):
    rows = [
        ("ada", repository("a", "2026-11-10", "2026-11-21")),
        ("late", repository("b", "2026-11-21")),
        ("gone", tmp_path / "nowhere"),
        ("../out", tmp_path / "a"),
        ("bob", repository("c", "2026-11-11")),
    ]
    table = tmp_path / "list.csv"
    table.write_text("student;url\n" + "".join(f"{name};{url}\n" for name, url in rows))
    app = typer.Typer()
    app.command()(collect_command)
    to = tmp_path / "submissions"
    words = ["--git", str(table), "--due", "2026-11-20 12:00:00", "--to", str(to)]

    said = CliRunner().invoke(app, words)

    assert sorted(path.name for path in to.iterdir()) == ["ada", "bob"]
    assert (to / "ada" / "01.ipynb").read_text() == "2026-11-10"
    changed = (to / "ada" / "01.ipynb").stat().st_mtime
    assert datetime.fromtimestamp(changed).isoformat() == "2026-11-10T12:00:00"
    assert "late: skipped, there is no commit before 2026-11-20 12:00" in said.output
    assert "gone: skipped, " in said.output
    assert "../out: skipped, the name cannot be a folder's" in said.output
    assert "student's own" in said.output
    assert "3 of the repositories" in str(said.exception)

    again = CliRunner().invoke(app, words)
    assert "bob: skipped, " in again.output


def test_a_table_may_come_from_a_spreadsheet_program(tmp_path):
    path = tmp_path / "list.csv"
    path.write_bytes('\ufeffstudent;url\r\n"a;b";x\r\n'.encode())

    assert read_table(path, "student", "url") == [{"student": "a;b", "url": "x"}]
    with pytest.raises(ValueError, match="no column 'points'"):
        read_table(path, "points")


@pytest.mark.parametrize(
    ("text", "system", "students", "found"),
    [
        ("student\nada\nbob\n", "", ["ada", "bob"], "ada"),
        (
            "Identifier,Full name,Grade\nParticipant 4711,Ada Lovelace,\nParticipant 2,B_C,\n",
            "Moodle",
            ["Ada Lovelace_4711", "B C_2"],
            "Lovelace Ada_4711",
        ),
        (
            'Student,ID,Section,Lab (7)\n"    Points Possible",,,100\n"Lovelace, Ada",123,A,\n',
            "Canvas",
            ["lovelaceada_123"],
            "adalovelace_123",
        ),
    ],
)
def test_a_class_list_is_a_systems_or_has_a_column_of_students(
    tmp_path, text, system, students, found
):
    (tmp_path / "class.csv").write_text(text)

    listed = read_class(tmp_path / "class.csv")

    assert (listed.system, list(listed.rows)) == (system, students)
    assert listed.find(found) == students[0]
    assert listed.find("nobody") is None
    (tmp_path / "class.csv").write_text("name\nada\n")
    with pytest.raises(ValueError, match="no column 'student'"):
        read_class(tmp_path / "class.csv")
