"""The three-day path: which exercises belong to which day, and how far a student is on it.

`theory/three-days.md` says it, for readers and for this module: below a heading "## Day 1 · ..." a
row of the table begins with *core* or *extra*, names its exercises in bold letters (**1-3**), and
has its minutes in the last column but one.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from labsupport import paths
from labsupport.course import checklist
from labsupport.course.progress import PASSED, CheckState, name_of

CORE, EXTRA = "core", "extra"

_DAY = re.compile(r"^## Day (\d) · (.+)$", re.MULTILINE)
_ROW = re.compile(rf"^\| ({CORE}|{EXTRA}) \|(.*)\| (\d+) \|[^|]*\|$", re.MULTILINE)
_EXERCISE = re.compile(r"\*\*(\d-\d)\*\*")


class Step(NamedTuple):
    """One row of a day's table, "core" or "extra"; exercises such as "1-3"."""

    kind: str
    exercises: tuple[str, ...]
    minutes: int


class Day(NamedTuple):
    """One day of the path: its number, its title, its steps in order."""

    number: int
    title: str
    steps: tuple[Step, ...]

    def exercises(self, kind: str) -> list[str]:
        """The exercises of its core, or its extra ones, in order."""
        return [name for step in self.steps if step.kind == kind for name in step.exercises]


def read_days(page: Path | None = None) -> list[Day]:
    """The days of the path, in order, from its page; raise OSError if there is none."""
    page = paths.project_root() / "theory" / "three-days.md" if page is None else page
    parts = _DAY.split(page.read_text(encoding="utf-8"))
    days = []
    for number, title, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        own = text.split("\n## ", 1)[0]
        steps = [
            Step(kind, tuple(_EXERCISE.findall(what)), int(minutes))
            for kind, what, minutes in _ROW.findall(own)
        ]
        days.append(Day(int(number), title, tuple(steps)))
    return days


def lines_of_path(
    days: Sequence[Day], checks: Mapping[str, list[CheckState]], boxes: Sequence[checklist.Item]
) -> list[str]:
    """Report a student's progress on the path: a line for each day, and one for each kind of tick.

    Exercises of notebooks that the student has not got are not counted.

    Args:
        checks: by notebook, as `Progress.checks`.
        boxes: of the student's checklist; empty if there is none.
    """
    # "ex-1-3-online-softmax" is 1-3 to the path; those of further/ stand apart.
    passed: dict[tuple[bool, str], dict[str, bool]] = {}
    for notebook, own in checks.items():
        for check in own:
            number = "-".join(check.exercise.split("-")[1:3])
            parts = passed.setdefault((notebook.startswith("further/"), number), {})
            parts[check.exercise] = parts.get(check.exercise, True) and check.status == PASSED

    def found(day: Day, kind: str) -> list[dict[str, bool]]:
        places = (kind == EXTRA, kind != EXTRA)
        groups = (
            next((passed[p, number] for p in places if (p, number) in passed), None)
            for number in day.exercises(kind)
        )
        return [group for group in groups if group]

    out = []
    for day in days:
        core, extra = found(day, CORE), found(day, EXTRA)
        if not core and not extra:
            continue
        ticks = [box.ticked for box in boxes if box.day == day.number]
        counts = [f"{_count(all(parts.values()) for parts in core)} exercises"]
        counts += [f"{_count(all(parts.values()) for parts in extra)} extra"] if extra else []
        counts += [f"{_count(ticks)} ticks"] if ticks else []
        every = (item for parts in [*core, *extra] for item in parts.items())
        first = next((name for name, done in every if not done), None)
        upcoming = f"next: {name_of(first)}" if first else "all exercises done"
        out.append(f"  Day {day.number}: {', '.join(counts)}; {upcoming}")
    if out:
        out.insert(0, "the three-day path (theory/three-days.md)")
    if boxes:
        ticks = (
            f"{word} {_count(box.ticked for box in boxes if box.kind == kind)}"
            for kind, word in checklist.KINDS.items()
        )
        out.append(f"  ticks in {checklist.FILE}: {', '.join(ticks)}")
    return out


def _count(done: Iterable[bool]) -> str:
    values = list(done)
    return f"{sum(values)} of {len(values)}"


def progress_on_path(folder: Path | None, checks: Mapping[str, list[CheckState]]) -> list[str]:
    """Return the lines of `labsupport progress` on the path; none where the page is not there."""
    try:
        days = read_days()
        file = (folder or paths.work_dir()) / checklist.FILE
    except (OSError, paths.ProjectNotFoundError):
        return []
    boxes = checklist.items(file.read_text(encoding="utf-8")) if file.exists() else []
    return lines_of_path(days, checks, boxes)
