"""What an instructor reads and returns: points, a page per student, the class at a glance."""

from grader.reports.write import overruled, write_reports

__all__ = ["overruled", "write_reports"]
