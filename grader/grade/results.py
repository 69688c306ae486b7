"""What grading one submission gave: plain values, kept as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

# Of a check: it passed; it found a mistake; the exercise is still a stub; its solution cell is not
# there; the student's process died; it took too long; the submission was not run.
CHECK_STATUSES = ("passed", "failed", "not written", "missing", "died", "timeout", "not run")


@dataclass(frozen=True)
class CheckResult:
    """One check cell, all or nothing.

    Attributes:
        grade_id: the check cell's.
        exercise: the solution cell's grade_id, such as "ex-1-3-online-softmax".
        points: what it is worth, from the instructor's notebook.
        status: one of CHECK_STATUSES.
        message: the diagnosis, or what happened; plain text.
        seconds: how long it took.
        given: points that an instructor gave instead, or None.
        remark: the instructor's, for the student.
    """

    grade_id: str
    exercise: str
    points: float
    status: str
    message: str = ""
    seconds: float = 0.0
    given: float | None = None
    remark: str = ""

    @property
    def earned(self) -> float:
        """All points or none, or what an instructor gave."""
        if self.given is not None:
            return self.given
        return self.points if self.status == "passed" else 0.0


@dataclass(frozen=True)
class Flag:
    """Something that an instructor should look at; it takes no points by itself.

    Attributes:
        grade_id: the cell that it is about, or "" for the whole submission.
        kind: a short word, such as "library call", "late", "duplicate".
        text: one or two sentences.
    """

    grade_id: str
    kind: str
    text: str


@dataclass(frozen=True)
class SubmissionResult:
    """One notebook that one student handed in.

    Attributes:
        student: the identifier by which the course knows the student.
        notebook: the lab's notebook, such as "01-Setup_and_Comparison".
        path: of the file, relative to the folder of submissions.
        digest: SHA-256 of the file, so that a later version is graded anew.
        edition: which student edition it came from, if it says so.
        status: "graded", or "refused" with no checks run, and `reason` says why.
        checks: every check cell of the instructor's notebook, in its order.
        flags: for manual review.
        seconds: the whole time.
        peak_memory_bytes: of the student's processes.
    """

    student: str
    notebook: str
    path: str
    digest: str
    edition: str = ""
    status: str = "graded"
    reason: str = ""
    checks: tuple[CheckResult, ...] = ()
    flags: tuple[Flag, ...] = ()
    seconds: float = 0.0
    peak_memory_bytes: int = 0

    @property
    def points(self) -> float:
        """What the notebook is worth."""
        return sum(check.points for check in self.checks)

    @property
    def earned(self) -> float:
        """The points of the checks that passed."""
        return sum(check.earned for check in self.checks)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), ensure_ascii=True)

    @staticmethod
    def from_json(line: str) -> SubmissionResult:
        """What `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            given: dict[str, Any] = json.loads(line)
            given["checks"] = tuple(CheckResult(**check) for check in given["checks"])
            given["flags"] = tuple(Flag(**flag) for flag in given["flags"])
            return SubmissionResult(**given)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no result of grading: {error}") from error
