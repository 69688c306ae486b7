"""All reports of a run of grading: points as CSV, pages, and both as Moodle and Canvas want them.

Moodle reads a worksheet by its columns Identifier, Grade and "Last modified (grade)", and feedback
by folders such as "Ada Lovelace_4711_assignsubmission_file_". Canvas reads a gradebook by Student,
ID and Section, and files by the numbers of student and attachment in their names.
"""

import csv
import io
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from grader.grade.results import SubmissionResult
from grader.grade.submissions import (
    NO_CLASS,
    ClassList,
    Submission,
    origin_of,
    read_table,
)
from grader.reports.pages import (
    Course,
    earned,
    overview_page,
    page_names,
    plain,
    points,
    student_page,
    texts_of,
)
from labsupport.course import files

# A formula for spreadsheet programs: at the beginning of a value, and after what some of them take
# for the end of one (a comma here is a semicolon in other countries' settings).
_FORMULA = re.compile(r"(^|[;,\t\r\n])(?=[\s\"]*[=+\-@＝＋－＠])")
_OF_STUDENT = (
    *("Student", "LastName", "FirstName", "ID", "SIS User ID", "SIS Login ID"),
    *("Integration ID", "Root Account", "Section"),
)
_GRADES = (
    *("student", "notebook", "points", "out_of", "flags"),
    *("status", "reason", "seconds", "file"),
)


def guarded(text: str) -> str:
    """Return a text that no spreadsheet program computes: an apostrophe before `=` and the like."""
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
    rows = []
    for r in course.results:
        kinds = "; ".join(dict.fromkeys(flag.kind for flag in r.flags))
        out_of = points(course.out_of(r.notebook)) if r.notebook else "0"
        rows.append([r.student, r.notebook, points(r.earned), out_of, kinds, r.status, r.reason])
        rows[-1] += [f"{r.seconds:.1f}", r.path]
    return table(_GRADES, rows)


def points_csv(course: Course) -> str:
    """Write a row for each student: points of each notebook, all together, and each exercise.

    Points of `further/` are in the column "bonus", not in the total. A notebook that a student did
    not hand in is empty, and counts as 0 in the total.
    """
    exercises = [(name, q.exercise) for name in course.questions for q in course.questions[name]]
    apart = ["bonus"] if course.bonus else []
    header = ["student", *course.questions, "total", "out_of", *apart]
    header += [name for _, name in exercises]

    def row(student: str) -> list[str]:
        own = {result.notebook: result for result in course.of_student(student)}
        return [
            student,
            *(points(own[name].earned) if name in own else "" for name in course.questions),
            points(course.total(student)),
            points(course.out_of()),
            *(points(course.extra(student)) for _ in apart),
            *(points(earned(own[nb], name)) if nb in own else "" for nb, name in exercises),
        ]

    return table(header, map(row, [*course.students, *course.missing]))


def exports_of(course: Course, pages: Mapping[str, str]) -> dict[str, bytes]:
    """Make files for the course system, by name; none where nothing came from one."""
    files = {one.student: one.path.split("/")[0] for one in course.results if origin_of(one.path)}
    systems = [origin.system for origin in map(origin_of, files.values()) if origin]
    system = course.class_list.system or next(iter(systems), "")
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
    known = {name: one for one, name in course.listed.items()}
    rows = {name: (row, known.get(name, "")) for name, row in course.class_list.rows.items()}
    origins = {one.student: origin_of(one.path) for one in course.results}
    unknown = [one for one, name in course.listed.items() if name is None]
    return rows | {one: ({}, one) for one in unknown if (o := origins[one]) and o.number}


def _moodle_grades(course: Course) -> str:
    rows = _rows(course)
    columns = ["Identifier", "Full name", "Grade", "Last modified (grade)"]
    columns = next((list(row) for row, _ in rows.values() if row), columns)
    lines = []
    for name, (row, student) in rows.items():
        full_name, _, number = name.rpartition("_")
        known = {"Identifier": f"Participant {number}", "Last modified (grade)": "-"}
        known |= {"Full name": full_name}
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
        filled = dict(zip(("Student", "_", "ID"), name.rpartition("_"), strict=True)) | row
        own = {result.notebook: result.earned for result in course.of_student(student)}
        reached = [points(own.get(one, 0)) for one in notebooks]
        total = points(course.total(student))
        lines.append([*(filled.get(column, "") for column in columns), *reached, total])
    return table([*columns, *notebooks, "All notebooks"], lines, guard=False)


def _overruled(results: Sequence[SubmissionResult], out: Path) -> list[SubmissionResult]:
    """Put the points and remarks of OUT/overrides.csv in place of those of checks."""
    changed, path = list(results), out / "overrides.csv"
    for row in read_table(path, "student", "check", "points", "remark") if path.exists() else ():
        try:
            given = float(row["points"].replace(",", "."))
        except ValueError:
            raise ValueError(f"{path}: no points for {row['student']}: {row['points']!r}") from None
        for index, result in enumerate(changed):
            named = [check for check in result.checks if check.grade_id == row["check"]]
            if result.student == row["student"] and named:
                new = replace(named[0], given=given, remark=row["remark"])
                checks = tuple(new if check is named[0] else check for check in result.checks)
                changed[index] = replace(result, checks=checks)
                break
        else:
            raise ValueError(f"{path}: {row['student']!r} has no result of {row['check']!r}")
    return changed


def write_reports(
    results: Sequence[SubmissionResult],
    out: Path,
    submissions: Iterable[Submission] = (),
    *,
    notebooks: Path | None = None,
    class_list: ClassList = NO_CLASS,
) -> tuple[list[SubmissionResult], list[Path]]:
    """Write `overview.html`, `points.csv`, `grades.csv`, `students/*.html` and `return/*`.

    Older reports in the folder are replaced. A student's page stands alone, to be sent. Of two
    results for a student and notebook the later counts. OUT's `overrides.csv` (student, check,
    points, remark) changes them, if it is there. The submissions have the texts of cells.

    Returns:
        the results with the overrides, and the files, the overview first.

    Raises:
        ValueError: a line of the overrides names no check of a student's, or has no points.
    """
    results = _overruled(results, out)
    course = Course.of(results, notebooks, class_list)
    names = page_names(course.students)
    pages = {student: student_page(course, student) for student in course.students}
    texts = {
        out / "overview.html": overview_page(course, names, texts_of(submissions)),
        # Spreadsheet programs take a CSV file for UTF-8 only if it begins with this mark.
        out / "grades.csv": "\ufeff" + grades_csv(course),
        out / "points.csv": "\ufeff" + points_csv(course),
        **{out / names[student]: page for student, page in pages.items()},
    }
    (out / "students").mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        files.replace(path, text)
    exports = {out / "return" / name: data for name, data in exports_of(course, pages).items()}
    for path, data in exports.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return results, [*texts, *exports]
