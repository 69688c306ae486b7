"""Finding the notebooks that students handed in: whose they are, and which of the lab's."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from grader.grade.files import File, files_in, is_notebook, is_zip, nothing, origin_of
from grader.grade.notebooks import (
    JOINERS,
    Cell,
    Pristine,
    UnreadableError,
    parse,
    printable,
    pristine_notebooks,
)
from grader.grade.results import Flag
from labsupport.course.files import lies_beside

MAX_FILES, MAX_NAME = 40, 200


@dataclass(frozen=True)
class Submission:
    """A file that was handed in.

    Attributes:
        notebook: the lab's notebook, such as "01-Setup_and_Comparison"; "" if unknown.
        path: relative to the folder of submissions.
        digest: SHA-256 of the file, so that a later version is graded anew.
        refused: why it cannot be graded, or "". Then it has no points, and stops nothing.
    """

    student: str
    notebook: str
    path: str
    digest: str
    refused: str = ""
    cells: tuple[Cell, ...] = field(default=(), repr=False)
    modified: datetime | None = None
    flags: tuple[Flag, ...] = ()


def find_submissions(
    folder: Path,
    *,
    notebooks: Path | None = None,
    due: datetime | None = None,
    only: str = "",
) -> list[Submission]:
    """Find all that was handed in, by student and notebook.

    A student is whom Moodle or Canvas name in a folder's or file's name, else a folder or zip in
    `folder`, or the beginning of a file's name: STUDENT--NOTEBOOK.ipynb, STUDENT_NOTEBOOK.ipynb.
    A file with the lab's own name belongs to the student after whom `folder` is named.

    Args:
        folder: of students' folders, or of notebooks; the zip of a course system; or one notebook.
        notebooks: the solved ones; the lab's own if None.
        due: later files get a flag "late"; local time if it names no time zone. Moodle and Canvas
            put the time of the download into their zips, so their files get none.
        only: the beginning of a notebook's name, such as "01". Refused files of which nothing tells
            the notebook are found, too.

    Raises:
        ValueError: there is no such folder, or no notebook in it.
    """
    pristine = pristine_notebooks(notebooks)
    home = folder.resolve().name if folder.is_dir() else folder.resolve().parent.name
    students: dict[str, list[File]] = defaultdict(list)
    for file in files_in(folder):
        owner = file.path.split("/")[0]
        if "/" in file.path or _may_be_one(file.path) or origin_of(owner):
            students[_student(owner, pristine, home)].append(file)
    found: list[Submission] = []
    for student, files in students.items():
        theirs = [one for one in files if _may_be_one(one.path)][:MAX_FILES]
        theirs = theirs or [replace(files[0], read=nothing)]
        found += [_read(file, student, pristine, due) for file in theirs]
    if not found:
        raise ValueError(f"there is no notebook (*.ipynb) in {folder}")
    if only:
        known = any(name.startswith(only) for name in pristine)
        found = [one for one in found if known and (one.notebook or only).startswith(only)]
        if not found:
            raise ValueError(f"there is no submission of {only} in {folder}")
    return sorted(_newest(found), key=lambda one: (one.student, one.notebook, one.path))


def _may_be_one(path: str) -> bool:
    # Of zips, only those that cannot be read get here.
    return is_notebook(path) or is_zip(path)


def _student(owner: str, pristine: Mapping[str, Pristine], home: str) -> str:
    if origin := origin_of(owner):
        return origin.student
    if not _may_be_one(owner):
        return owner
    stem = owner[: owner.lower().rindex(".zip" if is_zip(owner) else ".ipynb")]
    if "--" in stem:
        return stem.split("--")[0]
    for name in pristine:
        if stem.startswith(name):
            return home
        if stem.endswith(name):
            return stem.removesuffix(name).rstrip("_- ")
    return stem


def _trick(student: str, path: str) -> str:
    """Say what is wrong with a name: "" if nothing is."""
    if not all(c.isprintable() or c in JOINERS for c in student + path):
        return "its name holds characters that cannot be seen"
    if "\\" in student + path or student.startswith("-"):
        return "its name could be taken for a path or an option"
    if not student.strip() or any(len(part) > MAX_NAME for part in path.split("/")):
        return "its name is too long, or empty"
    return ""


def _read(
    file: File, student: str, pristine: Mapping[str, Pristine], due: datetime | None
) -> Submission:
    digest, cells, flags = "", (), []
    notebook = next((name for name in pristine if name in file.path), "")
    path = printable("/".join(part[:MAX_NAME] for part in file.path.split("/")))
    if not (refused := _trick(student, file.path)):
        try:
            data = file.read()
            digest = hashlib.sha256(data).hexdigest()
            cells = parse(data)
            notebook = _which(cells, pristine) or notebook
            refused = "" if notebook else "it holds no exercise of the lab's notebooks"
        except UnreadableError as error:
            refused = str(error)
        except (OSError, MemoryError) as error:
            refused = f"it cannot be read: {getattr(error, 'strerror', '') or error!r}"
    origin = origin_of(path)
    if origin and origin.late:
        flags.append(Flag("", "late", "Canvas marked it as late."))
    elif due and file.modified and not origin and file.modified > due.astimezone():
        flags.append(Flag("", "late", f"The file is of {file.modified:%Y-%m-%d %H:%M}."))
    student, refused = printable(student), printable(refused)
    return Submission(student, notebook, path, digest, refused, cells, file.modified, tuple(flags))


def _which(cells: tuple[Cell, ...], pristine: Mapping[str, Pristine]) -> str:
    """Return the lab's notebook with which it shares most exercises and checks."""
    given = {cell.grade_id for cell in cells if cell.grade_id}
    shared = {name: len(given & {c.grade_id for c in one.cells}) for name, one in pristine.items()}
    best = max(shared, key=lambda name: shared[name])
    return best if shared[best] else ""


def _newest(found: list[Submission]) -> Iterator[Submission]:
    """Yield the newest of several files for one notebook; a flag names the others.

    What an upgrade of the lab has put beside a copy counts only where the copy is missing, and a
    broken file does not take the place of a good one.
    """
    groups: dict[tuple[str, str], list[Submission]] = defaultdict(list)
    for one in found:
        groups[one.student, one.notebook].append(one)
    for (_, notebook), group in groups.items():
        good = [one for one in group if not one.refused]
        if not (good and notebook):
            yield from group
            continue
        works = [one for one in good if not lies_beside(one.path)] or good
        newest = max(works, key=_age)
        texts = []
        if older := [one.path for one in works if one is not newest]:
            names = ", ".join(older[:5])
            texts = [f"Several files for this notebook; the newest counts. Passed over: {names}."]
        texts += [
            f"{one.path} was refused ({one.refused}); this file was graded instead."
            for one in group
            if one.refused and not lies_beside(one.path)
            if not (one.modified and newest.modified and one.modified < newest.modified)
        ]
        flags = (Flag("", "duplicate", text) for text in texts[:5])
        yield replace(newest, flags=(*newest.flags, *flags))


def _age(one: Submission) -> tuple[int, str, str]:
    # Canvas counts files up; its zips give all of them the time of the download.
    origin = origin_of(one.path)
    return origin.file if origin else 0, str(one.modified), one.path
