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
from grader.grade.submissions import NO_CLASS, ClassList, Submission, origin_of, read_table
from grader.reports import pages
from grader.reports.pages import Course, earned, plain, points
from labsupport.course import files

# A formula for spreadsheet programs: at the beginning of a value, and after what some of them take
# for the end of one (a comma here is a semicolon in other countries' settings).
_FORMULA = re.compile(r"(^|[;,\t\r\n])(?=[\s\"]*[=+\-@＝＋－＠])")
_OF_STUDENT = (
    *("Student", "LastName", "FirstName", "ID", "SIS User ID", "SIS Login ID"),
    *("Integration ID", "Root Account", "Section"),
)


def guarded(text: str) -> str:
    """Return a text that no spreadsheet program computes: an apostrophe before `=` and the like."""
    return _FORMULA.sub(r"\1'", plain(text))


def table(columns: Iterable[str], rows: Iterable[Mapping[str, str]], *, guard: bool = True) -> str:
    """Write a CSV file; `guard` keeps spreadsheet programs from computing any of it."""
    made, text = guarded if guard else plain, io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: made(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def grades_csv(course: Course) -> str:
    """Write a row for each student and notebook. A refused submission has 0 points."""
    rows = [
        {
            "student": r.student,
            "notebook": r.notebook,
            "points": points(r.earned),
            "out_of": points(course.out_of(r.notebook)) if r.notebook else "0",
            "flags": "; ".join(dict.fromkeys(flag.kind for flag in r.flags)),
            "status": r.status,
            "reason": r.reason,
            "seconds": f"{r.seconds:.1f}",
            "file": r.path,
        }
        for r in course.results
    ]
    return table(rows[0], rows)


def points_csv(course: Course) -> str:
    """Write a row for each student: points of each notebook, all together, and each exercise.

    Points of `further/` are in the column "bonus", not in the total. A notebook that a student did
    not hand in is empty, and counts as 0 in the total.
    """
    columns = [
        "student",
        *course.questions,
        "total",
        "out_of",
        *(["bonus"] if course.bonus else []),
    ]
    columns += [q.exercise for asked in course.questions.values() for q in asked]

    def row(student: str) -> dict[str, str]:
        made = {"student": student, "out_of": points(course.out_of())}
        made |= {
            "total": points(course.total(student)),
            "bonus": points(course.total(student, bonus=True)),
        }
        for result in course.of_student(student):
            made[result.notebook] = points(result.earned)
            for q in course.questions.get(result.notebook, ()):
                made[q.exercise] = points(earned(result, q.exercise))
        return made

    return table(columns, map(row, [*course.students, *course.missing]))


def exports_of(course: Course, made: Mapping[str, str]) -> dict[str, bytes]:
    """Make files for the course system from students' pages; none where nothing came from one."""
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
            archive.writestr(zipfile.ZipInfo(name), made[student], zipfile.ZIP_DEFLATED)
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
        known = {"Identifier": f"Participant {number}", "Full name": full_name}
        known["Last modified (grade)"] = "-"
        lines.append(known | row | {"Grade": points(course.total(student))})
    return table(columns, lines, guard=False)


def _canvas_grades(course: Course) -> str:
    rows, last = _rows(course), "All notebooks"
    first = next((row for row, _ in rows.values() if row), {"Student": "", "ID": "", "Section": ""})
    columns = [column for column in first if column in _OF_STUDENT]
    worth = {one: points(course.out_of(one)) for one in course.questions}
    lines = [{"Student": "    Points Possible", **worth, last: points(course.out_of())}]
    for name, (row, student) in rows.items():
        known = dict(zip(("Student", "_", "ID"), name.rpartition("_"), strict=True))
        reached = dict.fromkeys(course.questions, "0")
        reached |= {r.notebook: points(r.earned) for r in course.of_student(student)}
        lines.append(known | row | reached | {last: points(course.total(student))})
    return table([*columns, *course.questions, last], lines, guard=False)


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

    Of two results for a student and notebook the later counts. OUT's `overrides.csv` (student,
    check, points, remark) changes them; a line without points, or of no check, is a ValueError. The
    submissions have the texts of cells. Return the results, and the files, the overview first.
    """
    results = _overruled(results, out)
    course = Course.of(results, notebooks, class_list)
    names = pages.page_names(course.students)
    made = {student: pages.student_page(course, student) for student in course.students}
    texts = {
        "overview.html": pages.overview_page(course, names, pages.texts_of(submissions)),
        # Spreadsheet programs take a CSV file for UTF-8 only if it begins with this mark.
        "grades.csv": "\ufeff" + grades_csv(course),
        "points.csv": "\ufeff" + points_csv(course),
        **{names[student]: page for student, page in made.items()},
    }
    exports = {f"return/{name}": data for name, data in exports_of(course, made).items()}
    written = {out / path: data for path, data in (texts | exports).items()}
    for path, data in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, data)
    return results, list(written)
