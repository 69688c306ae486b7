"""Finding the notebooks that students handed in: whose they are, and which of the lab's."""

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

from grader.grade.pristine import Pristine, pristine_notebooks
from grader.grade.reading import (
    JOINERS,
    Cell,
    UnreadableError,
    parse,
    printable,
    read_bytes,
)
from grader.grade.results import Flag
from labsupport.course.files import lies_beside

MAX_DEPTH, MAX_FILES, MAX_NAME = 5, 200, 200
_MOODLE = re.compile(r"^(?P<student>.+?_\d+)_assignsubmission_")
# A joiner beside a letter that is not ASCII; anywhere else it makes two names look the same.
_JOINED = re.compile(rf"(?<=[^\x00-\x7f])[{JOINERS}]|[{JOINERS}](?=[^\x00-\x7f])")
# The user's or group's name, small letters and underscores, and the user's ID; or anon_ and a code.
# Then the attachment's number, and the file's own name.
_CANVAS = re.compile(
    r"^(?P<name>[^-\s/]+?_)??(?P<late>LATE_)?(?P<id>anon_[0-9A-Za-z]+|(?<=_)\d+)_(?P<number>\d+)_."
)


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
    """A file that cannot be graded; `reason` says why. It has no points, and stops nothing.

    `modified` is the file's time, None if that is not known.
    """

    student: str
    notebook: str
    path: str
    digest: str
    reason: str
    modified: datetime | None = None


def find_submissions(
    folder: Path, *, notebooks: Path | None = None, due: datetime | None = None
) -> list[Submission | Refused]:
    """All that was handed in, by student and notebook.

    A student is a folder in `folder` (of any depth up to 5), or the beginning of a file's name:
    STUDENT--NOTEBOOK.ipynb or STUDENT_NOTEBOOK.ipynb. The names that Moodle and Canvas give to
    folders and files are understood. If all files have the lab's own names, the folder is the
    student.

    Args:
        folder: of students' folders, or of notebooks.
        notebooks: the solved ones; the lab's own if None.
        due: later files get a flag "late"; local time if it names no time zone.

    Raises:
        ValueError: it is no folder, or there is no notebook in it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder of submissions")
    pristine = pristine_notebooks(notebooks)
    found = [
        _read(path, student, folder, pristine, due, late)
        for path, student, late in _files(folder, pristine)
    ]
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
    """Read one file.

    Args:
        path: the notebook.
        student: whose it is.
        notebooks: the solved ones; the lab's own if None.
        due: when it was due.
        folder: what the result's path is relative to; the file's folder if None.
    """
    pristine = pristine_notebooks(notebooks)
    return _read(path, student, folder or path.parent, pristine, due, late=False)


def _files(folder: Path, pristine: Mapping[str, Pristine]) -> Iterator[tuple[Path, str, bool]]:
    """Every file that might be a submission: (path, student, whether its name says late)."""
    top = sorted(os.scandir(folder), key=lambda entry: entry.name)
    top = [e for e in top if not e.name.startswith(".") or e.name.startswith("..")]
    files = [e for e in top if _is_notebook(e.name) and not e.is_dir(follow_symlinks=False)]
    folders = [e for e in top if e.is_dir(follow_symlinks=False) or _links_to_folder(e)]
    ours = bool(files) and not folders and all(Path(e.name).stem in pristine for e in files)
    for entry in files:
        if ours:
            yield Path(entry.path), folder.resolve().name, False
        else:
            yield Path(entry.path), *_student_of_file(Path(entry.name).stem, pristine)
    students: dict[str, list[Path]] = {}
    for entry in folders:
        moodle = _MOODLE.match(entry.name)
        student = moodle["student"] if moodle else entry.name
        students.setdefault(student, []).append(Path(entry.path))
    for student, theirs in students.items():
        paths = [
            path for here in theirs for path in ([here] if here.is_symlink() else _below(here))
        ]
        # Folders without a notebook are somebody who handed in nothing that can be graded.
        for path in paths or theirs[:1]:
            yield path, student, False


def _links_to_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not _is_notebook(entry.name)


def _is_notebook(name: str) -> bool:
    return name.lower().endswith(".ipynb")


def _below(folder: Path) -> Iterator[Path]:
    count = 0
    for here, folders, files in os.walk(folder):
        depth = len(Path(here).relative_to(folder).parts)
        folders[:] = (
            sorted(f for f in folders if not f.startswith(".")) if depth < MAX_DEPTH else []
        )
        for name in sorted(files):
            if _is_notebook(name) and not name.startswith("."):
                count += 1
                if count > MAX_FILES:
                    return
                yield Path(here, name)


def _student_of_file(stem: str, pristine: Mapping[str, Pristine]) -> tuple[str, bool]:
    # These first: a student who kept the lab's file name has it at the end of the system's.
    if moodle := _MOODLE.match(stem):
        return moodle["student"], False
    if canvas := _CANVAS.match(stem):
        return (canvas["name"] or "") + canvas["id"], bool(canvas["late"])
    for name in pristine:
        for mark in ("--", "_", "-", " "):
            if stem.endswith(mark + name):
                return stem.removesuffix(mark + name), False
    if "--" in stem:
        return stem.split("--")[0], False
    return stem, False


def _safe(name: str) -> str:
    """A name or path that can be printed, and written into a file; each part is cut."""
    name = "/".join(part[:MAX_NAME] for part in name.split("/"))
    kept = [c if c.isprintable() or c in JOINERS else f"\\x{ord(c):02x}" for c in name]
    return "".join(kept).encode("utf-8", "backslashreplace").decode("utf-8")


def _trick(name: str) -> str:
    """What is wrong with a name or path from a submission: "" if nothing is."""
    seen = _JOINED.sub("", name)
    if any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn") for c in seen):
        return "its name holds characters that cannot be seen"
    parts = name.split("/")
    if "\\" in name or name.startswith("-") or ".." in parts:
        return "its name could be taken for a path or an option"
    if not name.strip() or any(len(part) > MAX_NAME for part in parts):
        return "its name is too long, or empty"
    return ""


def _read(
    path: Path,
    student: str,
    folder: Path,
    pristine: Mapping[str, Pristine],
    due: datetime | None,
    late: bool,
) -> Submission | Refused:
    relative = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
    digest = ""

    def refuse(reason: str, notebook: str = "") -> Refused:
        return Refused(
            _safe(student), notebook, _safe(relative), digest, printable(reason), _modified(path)
        )

    if problem := _trick(student) or _trick(relative):
        return refuse(problem, _named(path.stem, pristine))
    try:
        if path.is_dir() and not path.is_symlink():
            return refuse("there is no notebook in this folder")
        raw = read_bytes(path)
        digest = raw.digest
        cells, edition = parse(raw.data)
    except UnreadableError as error:
        return refuse(str(error), _named(path.stem, pristine))
    except (OSError, MemoryError) as error:
        said = getattr(error, "strerror", None) or type(error).__name__
        return refuse(f"it cannot be read: {said}", _named(path.stem, pristine))
    notebook = _which(cells, pristine) or _named(path.stem, pristine)
    if not notebook:
        return refuse("it holds no exercise of the lab's notebooks")
    flags = []
    if due is not None and raw.modified > (due if due.tzinfo else due.astimezone()):
        flags.append(Flag("", "late", f"The file is of {raw.modified:%Y-%m-%d %H:%M}."))
    elif late:
        flags.append(Flag("", "late", "The course system marked it as late."))
    return Submission(
        _safe(student), notebook, relative, digest, cells, edition, raw.modified, tuple(flags)
    )


def _modified(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.lstat().st_mtime).astimezone()
    except (OSError, OverflowError, ValueError):
        return None


def _which(cells: tuple[Cell, ...], pristine: Mapping[str, Pristine]) -> str:
    """The lab's notebook with which it shares most exercises and checks."""
    given = {cell.grade_id for cell in cells if cell.grade_id}
    shared = {
        name: len(given & (one.solutions.keys() | one.graded.keys()))
        for name, one in pristine.items()
    }
    best = max(shared, key=lambda name: shared[name])
    return best if shared[best] else ""


def _named(stem: str, pristine: Mapping[str, Pristine]) -> str:
    return next((name for name in pristine if name in stem), "")


def _newest(found: list[Submission | Refused]) -> Iterator[Submission | Refused]:
    """Of several files for one notebook the newest counts, and says so.

    What an upgrade of the lab has put beside a copy counts only where the copy is missing.
    """
    groups: dict[tuple[str, str], list[Submission]] = {}
    for one in found:
        if isinstance(one, Submission):
            groups.setdefault((one.student, one.notebook), []).append(one)
    handed_in = set(groups)
    for group in groups.values():
        works = [one for one in group if not lies_beside(one.path)] or group
        works.sort(key=_age, reverse=True)
        newest, older = works[0], works[1:]
        if older:
            names = ", ".join(one.path for one in older[:5])
            text = f"Several files for this notebook; the newest counts. Passed over: {names}."
            newest = replace(newest, flags=(*newest.flags, Flag("", "duplicate", text)))
        flags = [Flag("", "duplicate", text) for text in islice(_refused_since(newest, found), 5)]
        yield replace(newest, flags=(*newest.flags, *flags))
    for one in found:
        # A broken file does not take the place of a good one, whose flag speaks of it.
        if isinstance(one, Refused) and (one.student, one.notebook) not in handed_in:
            yield one


def _age(one: Submission) -> tuple[int, str, str]:
    # Canvas counts attachments up; its archives give all files the time of the download.
    canvas = _CANVAS.match(one.path)
    return int(canvas["number"]) if canvas else 0, str(one.modified), one.path


def _refused_since(graded: Submission, found: Iterable[Submission | Refused]) -> Iterator[str]:
    """What to say of the refused files that are newer than what is graded in their place."""
    for one in found:
        if (
            isinstance(one, Refused)
            and (one.student, one.notebook) == (graded.student, graded.notebook)
            and not lies_beside(one.path)
            and not (one.modified and graded.modified and one.modified < graded.modified)
        ):
            yield f"{one.path} was refused ({one.reason}); this file was graded instead."
