"""All reports of a run of grading, written into one folder."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from grader.grade.results import SubmissionResult
from grader.grade.submissions import NO_CLASS, ClassList, Submission, read_table
from grader.reports.grades import exports_of, grades_csv, points_csv
from grader.reports.pages import Course, overview_page, page_names, student_page, texts_of
from labsupport.course import files

OVERRIDES = "overrides.csv"


def _overruled(results: Sequence[SubmissionResult], out: Path) -> list[SubmissionResult]:
    """Put the points and remarks of OUT/overrides.csv in place of those of checks."""
    changed, path = list(results), out / OVERRIDES
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
        OSError: a file cannot be written.
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
