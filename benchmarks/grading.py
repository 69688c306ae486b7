"""Seconds per submission of notebook 1: `labsupport grade` beside `nbgrader autograde`, in one run.

    python -m benchmarks grading

Thirty submissions, from perfect to untouched, are graded in one batch on one core. The first three
are then graded by nbgrader, on the same core. nbgrader runs every cell, also the long measurements;
`labsupport grade` runs what the checks need. Times depend on the machine, and on what else it does.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import torch

from benchmarks.runner import Case, Row, not_measured, run
from grader.grade.batch import run_batch
from grader.grade.settings import Settings
from grader.grade.submissions import find_submissions
from labsupport import paths
from labsupport.course.editions import make_edition

if TYPE_CHECKING:
    import pandas as pd

NAME = "01-Setup_and_Comparison"


def _grade_id(cell: nbformat.NotebookNode) -> str:
    return str(cell.metadata.get("nbgrader", {}).get("grade_id", ""))


def solutions_of(solved: nbformat.NotebookNode) -> dict[str, str]:
    """What the solution cells hold, by grade_id, without the markers that only instructors see."""
    return {
        _grade_id(cell): re.sub(r"(?m)^\s*### (BEGIN|END) .*\n?", "", cell.source)
        for cell in solved.cells
        if cell.metadata.get("nbgrader", {}).get("solution")
    }


def submissions(count: int) -> list[str]:
    """Notebooks of students, of whom each has solved one exercise less than the one before."""
    source = paths.notebooks_dir() / f"{NAME}.ipynb"
    solutions = solutions_of(nbformat.read(source, as_version=4))
    edition, made = make_edition(source).text, []
    for number in range(count):
        # Most of a class solves most of it: 6, 5, 4, 6, 5, 4, ... exercises, the last student none.
        wanted = len(solutions) - number % 3 if number < count - 1 or count == 1 else 0
        copy = nbformat.reads(edition, as_version=4)
        for cell in copy.cells:
            if _grade_id(cell) in list(solutions)[:wanted]:
                cell.source = solutions[_grade_id(cell)]
        made.append(nbformat.writes(copy))
    return made


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--submissions", type=int, default=30)
    parser.add_argument("--nbgrader", type=int, default=3, help="how many nbgrader grades too")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Grade by both.

    Returns:
        A row for each submission and program ("labsupport" or "nbgrader"): seconds, points, and
        batch_seconds, the wall time of the whole batch over the number of submissions.
    """
    # One core, for everything that is started from here.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["OMP_NUM_THREADS"] = "1"
    texts = submissions(options.submissions)
    with tempfile.TemporaryDirectory() as folder:
        solved = (paths.notebooks_dir() / f"{NAME}.ipynb").read_text(encoding="utf-8")
        course = Course(Path(folder) / "course", solved)
        ours = Case({"program": "labsupport"}, partial(_ours, texts, Path(folder)))
        theirs = [
            Case({"program": "nbgrader", "submission": n}, partial(_theirs, course, n, texts[n]))
            for n in range(options.nbgrader)
        ]
        return run([ours, *theirs], torch.device("cpu"))


def _ours(texts: list[str], folder: Path) -> list[Row]:
    for number, text in enumerate(texts):
        student = folder / "submissions" / f"student-{number:02}"
        student.mkdir(parents=True)
        (student / f"{NAME}.ipynb").write_text(text, encoding="utf-8")
    start = time.perf_counter()
    found = find_submissions(folder / "submissions")
    results = run_batch(found, folder / "out", Settings(jobs=1, unconfined=True))
    each = (time.perf_counter() - start) / len(texts)
    return [
        {"submission": n, "seconds": r.seconds, "points": r.earned, "batch_seconds": each}
        for n, r in enumerate(results)
    ]


def _theirs(course: Course, number: int, text: str) -> Row:
    seconds, points = course.grade(f"student-{number:02}", text)
    return {"seconds": seconds, "points": points}


class Course:
    """A course of nbgrader with the configuration that GRADING.md gives."""

    def __init__(self, folder: Path, solved: str) -> None:
        """Set it up with one assignment; `solved` is the text of the instructor's notebook."""
        self.folder = folder
        guide = (paths.project_root() / "GRADING.md").read_text(encoding="utf-8")
        configuration = guide.split("<<'CONFIG'\n")[1].split("CONFIG\n")[0]
        (folder / "source" / "lab").mkdir(parents=True)
        (folder / "nbgrader_config.py").write_text(configuration, encoding="utf-8")
        path = folder / "source" / "lab" / f"{NAME}.ipynb"
        path.write_text(solved, encoding="utf-8")
        self.run("generate_assignment", "lab")

    def run(self, *command: str) -> float:
        """Return the wall seconds of an nbgrader command.

        Raises:
            RuntimeError: it failed; with the end of its messages.
        """
        # Nothing of the user's own configuration; the lab, and this Python's kernel.
        environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(self.folder / "config"),
            "JUPYTER_PREFER_ENV_PATH": "1",
            "JUPYTER_PATH": f"{sys.prefix}/share/jupyter",
            "IPYTHONDIR": str(self.folder / "ipython"),
            "PYTHONPATH": str(paths.project_root()),
            "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        call = [sys.executable, "-m", "nbgrader", *command]
        start = time.perf_counter()
        done = subprocess.run(
            call, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"nbgrader {command[0]} failed: {done.stderr[-2000:]}")
        return time.perf_counter() - start

    def hand_in(self, student: str, text: str) -> Path:
        """Write a student's notebook where nbgrader expects it; returns its file."""
        path = self.folder / "submitted" / student / "lab" / f"{NAME}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        return path

    def grade(self, student: str, text: str) -> tuple[float, float]:
        """Autograde one student's notebook; returns wall seconds and points."""
        from nbgrader.api import Gradebook

        self.hand_in(student, text)
        seconds = self.run("autograde", "lab", "--student", student)
        with Gradebook(f"sqlite:///{self.folder / 'gradebook.db'}") as book:
            return seconds, float(book.find_submission("lab", student).score)


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    lines = not_measured(table, "program")
    ran = table[table.status == "ok"]
    summary = ran.groupby("program")[["seconds", "batch_seconds"]].median()
    lines.append(f"median seconds of a submission, alone and by the batch:\n{summary}")
    ours, theirs = (ran[ran.program == name] for name in ("labsupport", "nbgrader"))
    both = ours.merge(theirs, on="submission", suffixes=("", "_theirs"))
    if len(both):
        times = both.seconds_theirs.median() / both.seconds.median()
        same = (both.points == both.points_theirs).sum()
        lines.append(
            f"the {len(both)} that both graded: labsupport is {times:.1f} times faster; the same "
            f"points for {same}"
        )
    return "\n".join(lines)
