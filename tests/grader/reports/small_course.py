"""Results of a small course: one notebook of two exercises."""

from grader.grade.results import CheckResult, Flag, SubmissionResult

SQUARE, ROOT = "ex-1-1-square", "ex-1-2-root"


def check(name, status="passed", message="", points=1.0, exercise=SQUARE):
    return CheckResult(f"{exercise}-{name}", exercise, points, status, message)


def result(student, *checks, notebook="01-Squares", **more):
    path = more.pop("path", f"{student}/{notebook}.ipynb")
    return SubmissionResult(student, notebook, path, "d" * 64, checks=checks, **more)


def perfect(student, **more):
    checks = (check("values", points=2.0), check("signs"), check("values", exercise=ROOT))
    return result(student, *checks, **more)


def flag(kind="late", text="Two hours after the end."):
    return Flag("", kind, text)
