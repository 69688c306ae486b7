"""Texts of students' cells: the ones that a flag speaks of, and solutions that are equal."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from grader.grade.notebooks import Cell
from grader.grade.plan import parsed
from grader.grade.results import Flag, SubmissionResult
from grader.grade.submissions import Submission

# Parts of a syntax tree. Solutions of a line or two agree by chance.
_SMALLEST = 70
Texts = Mapping[tuple[str, str], Sequence[Cell]]


def texts_of(submissions: Iterable[Submission]) -> Texts:
    """Return the code cells of all files, by path and digest."""
    return {
        (one.path, one.digest): [cell for cell in one.cells if cell.kind == "code"]
        for one in submissions
    }


def cells_of(flag: Flag, result: SubmissionResult, texts: Texts) -> list[str]:
    """Return the cells that a flag speaks of: an exercise's, or those with the names in it."""
    cells = texts.get((result.path, result.digest), ())
    if flag.grade_id:
        return [cell.source for cell in cells if cell.grade_id == flag.grade_id]
    if not flag.text.startswith("Names "):
        return []
    names = re.findall(r"[\w.]*\w", flag.text.removeprefix("Names "))
    words = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    return [cell.source for cell in cells if not cell.grade_id and words.search(cell.source)]


def equal_solutions(
    results: Iterable[SubmissionResult], texts: Texts
) -> list[tuple[str, list[str], str]]:
    """Find solutions that several students handed in, but for comments and layout.

    Returns:
        exercise, students, and the text as the first of them wrote it; the longest come first.
    """
    same: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for result in results:
        written = {c.exercise for c in result.checks if c.status not in ("not written", "missing")}
        for cell in texts.get((result.path, result.digest), ()):
            tree = parsed(cell.source) if cell.grade_id in written else None
            if tree is not None and sum(1 for _ in ast.walk(tree)) >= _SMALLEST:
                same[cell.grade_id, ast.dump(tree)].setdefault(result.student, cell.source)
    found = [
        (exercise, list(sources), next(iter(sources.values())))
        for (exercise, _), sources in same.items()
        if len(sources) > 1
    ]
    return sorted(found, key=lambda one: (-len(one[2]), one))
