"""Settings and results of grading: plain values; results are stored as lines of JSON."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """An instructor's choices.

    `cell_timeout_s` is also for one check; `jobs` are graded at the same time, each on one core;
    `notebooks` is the folder of the solved notebooks, the lab's own if None. Where nothing keeps
    submissions from our files and processes, only what is `unconfined` is graded.
    """

    cell_timeout_s: float = 60.0
    notebook_timeout_s: float = 300.0
    memory_bytes: int = 4 * 2**30
    jobs: int = max(1, (os.cpu_count() or 1) // 2)
    notebooks: Path | None = None
    unconfined: bool = False


NAME = "results.jsonl"


@dataclass(frozen=True)
class CheckResult:
    """One check cell, all or nothing; its exercise is the solution cell's grade_id.

    The status is one of `reports.pages.STATUS_WORDS`, the message the diagnosis, or what happened.
    An instructor may have `given` points instead, with a remark.
    """

    grade_id: str
    exercise: str
    points: float
    status: str
    message: str = ""
    given: float | None = None
    remark: str = ""

    @property
    def earned(self) -> float:
        """All points or none, or what an instructor gave; a mistake costs points once."""
        if self.given is not None:
            return self.given
        return self.points if self.status in ("passed", "known mistake") else 0.0


@dataclass(frozen=True)
class Flag:
    """Something that an instructor should look at; with a grade_id, about that cell."""

    grade_id: str
    kind: str
    text: str


@dataclass(frozen=True)
class SubmissionResult:
    """One notebook that one student handed in; the first four fields are as in `Submission`.

    If it was refused, and no check was run, `reason` says why.
    """

    student: str
    notebook: str
    path: str
    digest: str
    reason: str = ""
    checks: tuple[CheckResult, ...] = ()
    flags: tuple[Flag, ...] = ()
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """The word for it: "graded" or "refused"."""
        return "refused" if self.reason else "graded"

    @property
    def points(self) -> float:
        """All points of the notebook."""
        return sum(check.points for check in self.checks)

    @property
    def earned(self) -> float:
        """The points that the student gets."""
        return sum(check.earned for check in self.checks)


def write_result(out: Path, result: SubmissionResult) -> None:
    """Add a line to OUT/results.jsonl; when this returns, it is on the disk."""
    with (out / NAME).open("ab") as file:
        # What an interruption cut off stays on its own line, and harms none.
        file.write(b"\n" + json.dumps(asdict(result)).encode())
        file.flush()
        os.fsync(file.fileno())


def read_results(out: Path) -> list[SubmissionResult]:
    """Read all results in OUT/results.jsonl, in the order in which they came.

    A line that was cut off, or has other fields, is passed over: its submission is graded again.
    """
    found = []
    for line in (out / NAME).read_bytes().split(b"\n") if (out / NAME).exists() else ():
        with contextlib.suppress(ValueError, TypeError):
            given: dict[str, Any] = json.loads(line.decode("ascii"))
            checks = tuple(CheckResult(**check) for check in given.pop("checks"))
            flags = tuple(Flag(**flag) for flag in given.pop("flags"))
            found.append(SubmissionResult(**given, checks=checks, flags=flags))
    return found
