"""Points and pages in the forms in which Moodle and Canvas take them back.

Moodle reads a grading worksheet by its columns Identifier, Grade and "Last modified (grade)", and a
zip of feedback files by folders such as "Ada Lovelace_4711_assignsubmission_file_". Canvas reads a
gradebook by its columns Student, ID and Section, and a zip of files by the numbers of student and
attachment in their names, as in its own download.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping

from grader.grade.files import origin_of
from grader.grade.tables import number_of
from grader.reports.course import Course
from grader.reports.grades import table
from grader.reports.rendering import points

_OF_STUDENT = (
    *("Student", "LastName", "FirstName", "ID", "SIS User ID", "SIS Login ID"),
    *("Integration ID", "Root Account", "Section"),
)


def exports_of(course: Course, pages: Mapping[str, str]) -> dict[str, bytes]:
    """Make files for the course system, by name; none where nothing came from one."""
    files = {one.student: one.path.split("/")[0] for one in course.results if origin_of(one.path)}
    system = course.class_list.system if course.class_list else ""
    origins = filter(None, map(origin_of, files.values()))
    system = system or next((origin.system for origin in origins), "")
    if system == "Moodle":
        grades = _moodle_grades(course)
        names = {one: f"{one}_assignsubmission_file_/feedback.html" for one in sorted(files)}
    elif system == "Canvas":
        grades = _canvas_grades(course)
        # A page has the name of a file that it answers.
        stems = {one: re.split(r"\.(?:ipynb|zip)", file)[0] for one, file in files.items()}
        names = {one: f"{stem}.html" for one, stem in stems.items()}
    else:
        return {}
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for student, name in names.items():
            # Always the same time, so that the same pages give the same file.
            archive.writestr(zipfile.ZipInfo(name), pages[student], zipfile.ZIP_DEFLATED)
    return {f"{system}-grades.csv": grades.encode(), f"{system}-feedback.zip": data.getvalue()}


def _rows(course: Course) -> dict[str, tuple[dict[str, str], str]]:
    """Return the class list's row and the student's name in the results, for everybody."""
    if course.class_list is None:
        return {one: ({}, one) for one in course.students if number_of(one)}
    listed = {one: course.class_list.find(one) for one in course.students}
    known = {name: one for one, name in listed.items()}
    rows = {name: (row, known.get(name, "")) for name, row in course.class_list.rows.items()}
    unknown = [one for one, name in listed.items() if name is None and number_of(one)]
    return rows | {one: ({}, one) for one in unknown}


def _moodle_grades(course: Course) -> str:
    rows = _rows(course)
    columns = ["Identifier", "Full name", "Grade", "Last modified (grade)"]
    columns = next((list(row) for row, _ in rows.values() if row), columns)
    lines = []
    for name, (row, student) in rows.items():
        known = {
            "Identifier": f"Participant {number_of(name)}",
            "Full name": name.rpartition("_")[0],
            "Last modified (grade)": "-",
        }
        filled = known | row | {"Grade": points(course.total(student))}
        lines.append([filled.get(column, "") for column in columns])
    return table(columns, lines, guard=False)


def _canvas_grades(course: Course) -> str:
    rows, notebooks = _rows(course), list(course.questions)
    first = next((row for row, _ in rows.values() if row), {"Student": "", "ID": "", "Section": ""})
    columns = [column for column in first if column in _OF_STUDENT]
    worth = [points(course.out_of(one)) for one in notebooks]
    lines = [["    Points Possible", *[""] * (len(columns) - 1), *worth, points(course.out_of())]]
    for name, (row, student) in rows.items():
        filled = {"Student": name.rpartition("_")[0], "ID": number_of(name)} | row
        own = {result.notebook: result.earned for result in course.of_student(student)}
        reached = [points(own.get(one, 0)) for one in notebooks]
        total = points(course.total(student))
        lines.append([*(filled.get(column, "") for column in columns), *reached, total])
    return table([*columns, *notebooks, "All notebooks"], lines, guard=False)
