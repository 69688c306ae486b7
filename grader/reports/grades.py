"""Points as CSV files, and points and pages in the forms in which Moodle and Canvas take them back.

Moodle reads a grading worksheet by its columns Identifier, Grade and "Last modified (grade)", and a
zip of feedback files by folders such as "Ada Lovelace_4711_assignsubmission_file_". Canvas reads a
gradebook by its columns Student, ID and Section, and a zip of files by the numbers of student and
attachment in their names, as in its own download.
"""

import csv
import io
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence

from grader.grade.results import SubmissionResult
from grader.grade.submissions import number_of, origin_of
from grader.reports.pages import Course, earned, plain, points

# A formula for spreadsheet programs: at the beginning of a value, and after what some of them take
# for the end of one (a comma here is a semicolon in other countries' settings).
_FORMULA = re.compile(r"(^|[;,\t\r\n])(?=[\s\"]*[=+\-@＝＋－＠])")
_OF_STUDENT = (
    *("Student", "LastName", "FirstName", "ID", "SIS User ID", "SIS Login ID"),
    *("Integration ID", "Root Account", "Section"),
)


def guarded(text: str) -> str:
    """Return a text that no spreadsheet program computes: an apostrophe before `=`, `+`, `-`, `@`.

    Texts that look like no formula, such as every ordinary identifier, stay as they are.
    """
    return _FORMULA.sub(r"\1'", plain(text))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, guard: bool = True) -> str:
    """Write a CSV file; `guard` keeps spreadsheet programs from computing any of it."""
    made = guarded if guard else plain
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [made(v) for v in row] for row in [header, *rows]
    )
    return text.getvalue()


def grades_csv(course: Course) -> str:
    """Write a row for each student and notebook. A refused submission has 0 points."""

    def row(result: SubmissionResult) -> dict[str, str]:
        return {
            "student": result.student,
            "notebook": result.notebook,
            "points": points(result.earned),
            "out_of": points(course.out_of(result.notebook)) if result.notebook else "0",
            "flags": "; ".join(dict.fromkeys(flag.kind for flag in result.flags)),
            "status": result.status,
            "reason": result.reason,
            "seconds": f"{result.seconds:.1f}",
            "file": result.path,
        }

    header = row(SubmissionResult("", "", "", ""))
    return table(list(header), [list(row(result).values()) for result in course.results])


def points_csv(course: Course) -> str:
    """Write a row for each student: points of each notebook, all together, and each exercise.

    A notebook that a student did not hand in is empty, and counts as 0 in the total.
    """
    exercises = [(name, q.exercise) for name in course.questions for q in course.questions[name]]
    header = ["student", *course.questions, "total", "out_of", *(name for _, name in exercises)]

    def row(student: str) -> list[str]:
        own = {result.notebook: result for result in course.of_student(student)}
        return [
            student,
            *(points(own[name].earned) if name in own else "" for name in course.questions),
            points(course.total(student)),
            points(course.out_of()),
            *(points(earned(own[nb], name)) if nb in own else "" for nb, name in exercises),
        ]

    return table(header, map(row, [*course.students, *course.missing]))


def exports_of(course: Course, pages: Mapping[str, str]) -> dict[str, bytes]:
    """Make files for the course system, by name; none where nothing came from one."""
    files = {one.student: one.path.split("/")[0] for one in course.results if origin_of(one.path)}
    origins = filter(None, map(origin_of, files.values()))
    system = course.class_list.system or next((origin.system for origin in origins), "")
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
