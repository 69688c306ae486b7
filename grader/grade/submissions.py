"""Finding the notebooks that students handed in: whose they are, and which of the lab's."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from grader.grade.files import (
    File,
    files_in,
    is_notebook,
    is_zip,
    nothing,
    origin_of,
    plain_file,
)
from grader.grade.pristine import Pristine, pristine_notebooks
from grader.grade.reading import JOINERS, Cell, UnreadableError, parse, printable
from grader.grade.results import Flag
from labsupport.course.files import lies_beside

MAX_FILES, MAX_NAME = 40, 200


@dataclass(frozen=True)
class Submission:
    """A notebook that can be graded.

    Attributes:
        student: as the course knows them.
        notebook: the lab's notebook, such as "01-Setup_and_Comparison".
        path: relative to the folder of submissions.
        digest: SHA-256 of the file.
        cells: what is kept of it.
        edition: which student edition it came from, if it says so.
        modified: the file's time.
        flags: what was noticed while it was read.
    """

    student: str
    notebook: str
    path: str
    digest: str
    cells: tuple[Cell, ...] = field(repr=False)
    edition: str = ""
    modified: datetime | None = None
    flags: tuple[Flag, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A file that cannot be graded; `reason` says why. It has no points, and stops nothing."""

    student: str
    notebook: str
    path: str
    digest: str
    reason: str
    modified: datetime | None = None


def find_submissions(
    folder: Path, *, notebooks: Path | None = None, due: datetime | None = None
) -> list[Submission | Refused]:
    """Find all that was handed in, by student and notebook.

    A student is whom Moodle or Canvas name in a folder's or file's name, else a folder or zip in
    `folder`, or the beginning of a file's name: STUDENT--NOTEBOOK.ipynb, STUDENT_NOTEBOOK.ipynb.
    A file with the lab's own name belongs to the student after whom `folder` is named.

    Args:
        folder: of students' folders, or of notebooks; the zip of a course system; or one notebook.
        notebooks: the solved ones; the lab's own if None.
        due: later files get a flag "late"; local time if it names no time zone. Moodle and Canvas
            put the time of the download into their zips, so their files get none.

    Raises:
        ValueError: there is no such folder, or no notebook in it.
    """
    pristine = pristine_notebooks(notebooks)
    home = folder.resolve().name if folder.is_dir() else folder.resolve().parent.name
    students: dict[str, list[File]] = {}
    for file in files_in(folder):
        if "/" in file.path or _may_be_one(file.path) or origin_of(file.owner):
            students.setdefault(_student(file.owner, pristine, home), []).append(file)
    found: list[Submission | Refused] = []
    for student, files in students.items():
        theirs = [one for one in files if _may_be_one(one.path)][:MAX_FILES]
        theirs = theirs or [replace(files[0], read=nothing)]
        found += [_read(file, student, pristine, due) for file in theirs]
    if not found:
        raise ValueError(f"there is no notebook (*.ipynb) in {folder}")
    return sorted(_newest(found), key=lambda one: (one.student, one.notebook, one.path))


def read_submission(
    path: Path,
    *,
    student: str,
    notebooks: Path | None = None,
    due: datetime | None = None,
    folder: Path | None = None,
) -> Submission | Refused:
    """Read one student's file; the result's path is relative to `folder`, else to the file's."""
    name = path.relative_to(folder or path.parent).as_posix()
    return _read(plain_file(path, name), student, pristine_notebooks(notebooks), due)


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
) -> Submission | Refused:
    digest, named = "", next((name for name in pristine if name in file.path), "")
    path = "/".join(part[:MAX_NAME] for part in file.path.split("/"))
    path = printable(path)

    def refuse(reason: str) -> Refused:
        return Refused(printable(student), named, path, digest, printable(reason), file.modified)

    if problem := _trick(student, file.path):
        return refuse(problem)
    try:
        data = file.read()
        digest = hashlib.sha256(data).hexdigest()
        cells, edition = parse(data)
    except UnreadableError as error:
        return refuse(str(error))
    except (OSError, MemoryError) as error:
        said = getattr(error, "strerror", None) or type(error).__name__
        return refuse(f"it cannot be read: {said}")
    notebook = _which(cells, pristine) or named
    if not notebook:
        return refuse("it holds no exercise of the lab's notebooks")
    flags = []
    origin = origin_of(path)
    if origin and origin.late:
        flags.append(Flag("", "late", "Canvas marked it as late."))
    elif due and file.modified and not origin and file.modified > due.astimezone():
        flags.append(Flag("", "late", f"The file is of {file.modified:%Y-%m-%d %H:%M}."))
    return Submission(student, notebook, path, digest, cells, edition, file.modified, tuple(flags))


def _which(cells: tuple[Cell, ...], pristine: Mapping[str, Pristine]) -> str:
    """Return the lab's notebook with which it shares most exercises and checks."""
    given = {cell.grade_id for cell in cells if cell.grade_id}
    shared = {
        name: len(given & (one.solutions.keys() | one.graded.keys()))
        for name, one in pristine.items()
    }
    best = max(shared, key=lambda name: shared[name])
    return best if shared[best] else ""


def _newest(found: list[Submission | Refused]) -> Iterator[Submission | Refused]:
    """Yield the newest of several files for one notebook; a flag names the others.

    What an upgrade of the lab has put beside a copy counts only where the copy is missing, and a
    broken file does not take the place of a good one.
    """
    groups: dict[tuple[str, str], list[Submission | Refused]] = {}
    for one in found:
        groups.setdefault((one.student, one.notebook), []).append(one)
    for (_, notebook), group in groups.items():
        good = [one for one in group if isinstance(one, Submission)]
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
            f"{one.path} was refused ({one.reason}); this file was graded instead."
            for one in group
            if isinstance(one, Refused) and not lies_beside(one.path)
            if not (one.modified and newest.modified and one.modified < newest.modified)
        ]
        flags = (Flag("", "duplicate", text) for text in texts[:5])
        yield replace(newest, flags=(*newest.flags, *flags))


def _age(one: Submission) -> tuple[int, str, str]:
    # Canvas counts files up; its zips give all of them the time of the download.
    origin = origin_of(one.path)
    return origin.file if origin else 0, str(one.modified), one.path
