"""All reports of a run of grading, written into one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grader.grade.results import SubmissionResult
from grader.reports.course import Course
from grader.reports.grades import grades_csv, points_csv
from grader.reports.overview import overview_page
from grader.reports.page import page_names, student_page
from labsupport import paths
from labsupport.course.files import replace


def write_reports(
    results: Sequence[SubmissionResult], out: Path, *, notebooks: Path | None = None
) -> list[Path]:
    """Write `grades.csv`, `points.csv`, `overview.html` and `students/*.html`.

    Older reports in the folder are replaced, each in one step, so that a reader never sees half a
    file. A student's page stands alone: it can be sent to the student without the rest.

    Args:
        results: what grading gave. Where a student handed in a notebook twice, the later in this
            order counts; the earlier is left out.
        out: the folder; it is created if need be.
        notebooks: the folder of the instructor's notebooks, from which the questions' titles are
            read; the lab's own if None. Without a notebook there, its exercises go by their
            grade_ids.

    Returns:
        the files, the overview first.

    Raises:
        OSError: a file cannot be written.
    """
    course = Course.of(results, paths.notebooks_dir() if notebooks is None else notebooks)
    names = page_names(course.students)
    pages = {
        out / "overview.html": overview_page(course, names),
        # Spreadsheet programs take a CSV file for UTF-8 only if it begins with this mark.
        out / "grades.csv": "\ufeff" + grades_csv(course),
        out / "points.csv": "\ufeff" + points_csv(course),
    }
    for student in course.students:
        pages[out / names[student]] = student_page(course, student)
    (out / "students").mkdir(parents=True, exist_ok=True)
    for path, text in pages.items():
        replace(path, text)
    return list(pages)
