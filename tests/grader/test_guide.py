"""GRADING.md is true: its commands, options, flags, columns and results are the program's."""

import ast
import csv
import json
import re
import shlex

import pytest
import typer

from grader.grade.results import SubmissionResult
from grader.reports.grades import grades_csv, points_csv
from grader.reports.pages import STATUS_WORDS, Course
from labsupport.cli import app


@pytest.fixture(scope="module")
def guide(project):
    return (project / "GRADING.md").read_text(encoding="utf-8")


def section(guide, title):
    """The text below a heading, up to the next one of its level or above."""
    level = re.search(rf"^(#+) {re.escape(title)}$", guide, re.MULTILINE)[1]
    below = guide.split(f"{level} {title}\n", 1)[1]
    return re.split(rf"^#{{1,{len(level)}}} ", below, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text, header):
    """The first cells of a table, which begins with this line."""
    lines = text.split(header + "\n", 1)[1].split("\n")[1:]
    return [line.split("|")[1].strip() for line in lines[: lines.index("")]]


def parse(*words):
    """Parse the options of `grade` without running it; fail where the program refuses them."""
    command = typer.main.get_command(app).commands["grade"]
    return command.make_context("grade", ["submissions", "--out", "results", *words]).params


def test_the_mistake_that_the_first_hour_makes_is_one_in_one_solution(project, guide):
    hour = section(guide, "Your first hour")
    ((wrong, right),) = [
        (new, old.replace("\\", "")) for old, new in re.findall(r"sed 's/([^/]+)/([^/]+)/'", hour)
    ]
    (notebook,) = (project / "notebooks").glob("01-*.ipynb")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    hit = [cell for cell in cells if right in "".join(cell["source"])]
    assert [cell["metadata"]["nbgrader"]["grade_id"] for cell in hit] == [
        "ex-1-1-textbook-attention"
    ]
    from labsupport import checks

    with pytest.raises(checks.CheckFailed) as failed:
        names = {}
        source = "".join(hit[0]["source"]).replace(right, wrong)
        exec("import math\nimport torch\n" + source, names)
        checks.check_textbook_values(names["textbook_attention"])
    (said,) = re.findall(r"its diagnosis is \*([^*]+)\*", " ".join(hour.split()))
    assert said in str(failed.value)


def test_the_program_accepts_every_option_in_the_table(guide):
    said = rows(section(guide, "2. Grade"), "| option | |")
    assert len(said) >= 8
    for cell in said:
        parse(*shlex.split(cell.strip("`")))


def test_the_limits_in_the_table_are_the_programs_own(guide):
    said = rows(section(guide, "2. Grade"), "| option | |")
    usual = parse()
    for option in ("timeout", "cell-timeout", "memory"):
        (value,) = (cell.strip("`").split()[1] for cell in said if cell.startswith(f"`--{option} "))
        assert float(value) == usual[option.replace("-", "_")]


def test_the_table_of_flags_names_those_that_the_grader_raises_and_no_others(project, guide):
    raised = set()
    for path in (project / "grader").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # `Flag(**stored)` reads a result that was written before.
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Flag" and node.args:
                kind = node.args[1]
                assert isinstance(kind, ast.Constant), f"{path}:{node.lineno}"
                raised.add(kind.value)
    assert set(rows(section(guide, "3. Look at the flags"), "| flag | what to do |")) == raised


def test_the_reports_columns_are_named_in_their_order(guide):
    course = Course.of([SubmissionResult("ada", "", "a.ipynb", "")])
    text = section(guide, "What the reports say")
    for made, title in ((grades_csv, "grades.csv"), (points_csv, "points.csv")):
        (header,) = csv.reader([made(course).split("\n")[0]])
        said = text.split(f"**`{title}`**", 1)[1].split("\n\n")[0]
        named = re.findall(r"`([a-z_]+)`", said)
        assert named == header, title


def test_the_table_of_results_has_the_words_of_the_pages(guide):
    said = rows(section(guide, "What the reports say"), "| result | |")
    assert said == [words for words, _ in STATUS_WORDS.values()]
