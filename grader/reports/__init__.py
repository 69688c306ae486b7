"""The reports for instructors and students: points, a page for each student, the class."""

from grader.reports.write import write_reports

__all__ = ["write_reports"]
