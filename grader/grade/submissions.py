"""Notebooks: the instructor's, which decide what counts, and those that students handed in.

Students' come in folders, or in zips as Moodle and Canvas make them, and may hold anything.
Instructors write tables: the class, repositories, overrides.
"""

import contextlib
import csv
import hashlib
import io
import json
import os
import re
import unicodedata
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from grader.grade.results import Flag
from labsupport.course.editions import solved_notebooks
from labsupport.course.files import lies_beside
from labsupport.profiling.units import format_bytes

MAX_BYTES = 20 * 2**20
MAX_CELLS, MAX_SOURCE, MAX_SOURCES = 5_000, 200_000, 2_000_000
_AGAIN = "Open it in JupyterLab, save it, and hand it in again"
# Cannot be seen, but Persian and Indic names are spelt with them.
JOINERS = "\u200c\u200d"


class UnreadableError(ValueError):
    """A file that is no notebook, or is not allowed to be read; says why."""


@dataclass(frozen=True)
class Cell:
    """A cell of a notebook; of a student's, only the first three are ever used.

    Its kind is "code", "markdown" or "raw"; `grade_id` is its name in nbgrader's metadata, or "".
    A check's exercise is the longest grade_id of a solution that its own begins with.
    """

    kind: str
    source: str
    grade_id: str = ""
    solution: bool = False
    grade: bool = False
    points: float = 0.0
    exercise: str = ""


@dataclass(frozen=True)
class Pristine:
    """A solved notebook: its name, all of its cells, and whether its points are a bonus."""

    name: str
    cells: tuple[Cell, ...]
    bonus: bool = False

    @cached_property
    def solutions(self) -> dict[str, Cell]:
        """The cells that students fill in, by grade_id."""
        return {cell.grade_id: cell for cell in self.cells if cell.solution}

    @cached_property
    def graded(self) -> dict[str, Cell]:
        """The cells that give points, by grade_id, in their order."""
        return {cell.grade_id: cell for cell in self.cells if cell.grade and not cell.solution}


def pristine_notebooks(folder: Path | None = None) -> dict[str, Pristine]:
    """Read the solved notebooks of a folder, or the lab's; raise ReleaseError if there are none."""
    return {path.stem: _solved(path) for path in solved_notebooks(folder)}


def _solved(path: Path) -> Pristine:
    content = json.loads(path.read_text(encoding="utf-8"))["cells"]
    cells = [_cell(cell, trusted=True) for cell in content]
    solutions = [cell.grade_id for cell in cells if cell.solution]

    def exercise(name: str) -> str:
        named = (one for one in solutions if f"{name}-".startswith(f"{one}-"))
        return max(named, key=len, default=name)

    whole = tuple(replace(cell, exercise=exercise(cell.grade_id)) for cell in cells)
    return Pristine(path.stem, whole, bonus=path.parent.name == "further")


def parse(data: bytes) -> tuple[Cell, ...]:
    """Return the cells of a student's file, in bounded time, or raise UnreadableError."""
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error).split())[:120]
        raise UnreadableError(f"it is not valid JSON ({said}). {_AGAIN}") from error
    version = content.get("nbformat") if isinstance(content, dict) else None
    if version != 4:
        said = f"it says notebook format {str(version)[:20]}; the lab's is 4"
        raise UnreadableError(f"{said}. {_AGAIN}")
    if not isinstance(cells := content.get("cells"), list) or len(cells) > MAX_CELLS:
        raise UnreadableError(f"it has no list of cells, or more than {MAX_CELLS:,}. {_AGAIN}")
    kept = tuple(_cell(cell) for cell in cells if isinstance(cell, dict))
    if sum(len(cell.source) for cell in kept) > MAX_SOURCES:
        raise UnreadableError(f"its cells hold more than {MAX_SOURCES:,} characters")
    return kept


def _cell(cell: dict[str, Any], trusted: bool = False) -> Cell:
    source = cell.get("source")
    lines = source if isinstance(source, list) else [source]
    source = "".join(line for line in lines if isinstance(line, str))
    if len(source) > MAX_SOURCE:
        raise UnreadableError(f"one of its cells has more than {MAX_SOURCE:,} characters")
    # Halves of surrogate pairs are no text: they can't be written to a file.
    source = source.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n")
    kind = cell.get("cell_type")
    kind = kind if kind in ("code", "markdown") else "raw"
    match cell.get("metadata"):
        case {"nbgrader": {"grade_id": str(name), **role}} if trusted:
            roles = bool(role.get("solution")), bool(role.get("grade"))
            return Cell(kind, source, name, *roles, float(role.get("points") or 0))
        case {"nbgrader": {"grade_id": str(name)}} if len(name) <= 200:
            return Cell(kind, source, name)
    return Cell(kind, source)


def printable(text: str, also: str = "") -> str:
    """Return a text without halves of surrogate pairs and control characters, but for `also`."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() or c in JOINERS + also else "?" for c in text)


MAX_ZIP_BYTES, MAX_MEMBERS = 100 * 2**20, 10_000
# "Ada Lovelace_4711_assignsubmission_file/01.ipynb", or one file "…_file_01.ipynb".
_MOODLE = re.compile(r"(?P<student>.+?_\d+)_assignsubmission_[a-z]+(?:_|$)")
# "lovelaceada_LATE_123_9001_01.ipynb": the name without signs, Canvas's numbers of the student and
# of the file, the file's own name. "anon_x5Ab1_9001_01.ipynb" where grading is anonymous.
_CANVAS = re.compile(
    r"(?P<name>[^/]+?_)??(?P<late>LATE_)?(?P<id>anon_[0-9A-Za-z]+|(?<=_)\d+)_(?P<file>\d+)_."
)


@dataclass(frozen=True)
class Origin:
    """A name that Moodle or Canvas gave; Canvas numbers files, newer ones higher."""

    system: str
    student: str
    file: int = 0
    late: bool = False

    @property
    def number(self) -> str:
        """The number by which the system knows the student: 4711; "" where it hides that."""
        return (re.search(r"_(\d+)$", self.student) or ["", ""])[1]


def composed(text: str) -> str:
    """Return a text with each accent in its letter; macOS writes them apart (NFD)."""
    return unicodedata.normalize("NFC", text)


def origin_of(path: str) -> Origin | None:
    """Return what Moodle or Canvas say with a file's path; None if it is not one of theirs."""
    name = path.split("/")[0]
    if found := _MOODLE.match(name):
        return Origin("Moodle", found["student"])
    if found := _CANVAS.match(name):
        student = (found["name"] or "") + found["id"]
        return Origin("Canvas", student, int(found["file"]), bool(found["late"]))
    return None


def _may_be_one(path: str) -> bool:
    # Some browsers save notebooks as text. Zips that can be read are opened before.
    return path.lower().endswith((".ipynb", ".ipynb.txt", ".ipynb.json", ".zip"))


def _is_zip(path: str) -> bool:
    return path.lower().endswith(".zip")


@dataclass(frozen=True)
class File:
    """Something handed in, to be read before the next; in its path, a zip counts as a folder."""

    path: str
    read: Callable[[], bytes]
    modified: datetime | None = None
    place: Path | None = None  # of a plain file that need not be read as a whole


def files_in(given: Path) -> Iterator[File]:
    """Find all but hidden files in a folder, a zip or a notebook; raise ValueError without one."""
    if not given.is_dir():
        if not given.is_file() or not _may_be_one(given.name):
            raise ValueError(f"{given} is no folder of submissions, no zip and no notebook")
        for file in _opened(_on_disk(given, given.name), inner_zips=1):
            # In the download of a course, the names in it say whose the files are.
            yield replace(file, path=file.path.removeprefix(f"{given.name}/"))
        return
    for here, folders, names in os.walk(given):
        folders[:] = sorted(name for name in folders if not _hidden(name))
        if Path(here) == given:
            # Students with nothing else in their folder.
            yield from (File(f"{name}/", nothing) for name in folders)
        for name in sorted(names):
            path = Path(here, name)
            if not _hidden(name):
                yield from _opened(_on_disk(path, path.relative_to(given).as_posix()))


def _on_disk(path: Path, name: str) -> File:
    """Name a file to be read: only a plain one, never through a link, never from a pipe."""
    modified = datetime.fromtimestamp(path.lstat().st_mtime).astimezone()
    if path.is_symlink() or not path.is_file():
        why = "it is a symbolic link" if path.is_symlink() else "it is not a plain file"
        return File(name, partial(_fail, why), modified)
    return File(name, partial(_bytes_of, path), modified, path)


def _opened(file: File, inner_zips: int = 0) -> Iterator[File]:
    """Yield the files in a zip, others themselves; where that fails, reading says why."""
    if not _is_zip(file.path):
        yield file
        return
    try:
        with zipfile.ZipFile(file.place or io.BytesIO(file.read())) as archive:
            members = archive.infolist()
            if len(members) > MAX_MEMBERS:
                raise ValueError(f"it holds more than {MAX_MEMBERS:,} files")
            for member in members:
                # Some programs on Windows write their own separators.
                name = member.filename.replace("\\", "/")
                if member.is_dir() or any(map(_hidden, name.split("/"))):
                    continue
                modified = None
                with contextlib.suppress(ValueError):  # some zips hold no time
                    modified = datetime(*member.date_time).astimezone()
                most = MAX_ZIP_BYTES if _is_zip(name) else MAX_BYTES
                read = partial(_member, archive, member, most)
                if _is_zip(name) and not inner_zips:
                    read = partial(_fail, "it is a zip in a zip. Hand in the notebook")
                    yield File(f"{file.path}/{name}", read, modified)
                else:
                    yield from _opened(File(f"{file.path}/{name}", read, modified), inner_zips - 1)
    except Exception as error:  # damaged zips raise many kinds
        yield replace(file, read=partial(_fail, f"the zip cannot be read: {error}"))


def _bytes_of(path: Path) -> bytes:
    _check_size(path.stat().st_size)
    return path.read_bytes()


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> bytes:
    _check_size(member.file_size, most)
    try:
        return archive.read(member)
    except Exception as error:  # zlib.error, lzma.LZMAError, ...
        raise UnreadableError(f"the zip cannot be read: {error}") from error


def _check_size(size: int, most: int = MAX_BYTES) -> None:
    if size > most:
        raise UnreadableError(
            f"it has {format_bytes(size)}, and {format_bytes(most)} are allowed: "
            "clear the outputs and hand it in again"
        )


def _fail(reason: str) -> bytes:
    raise UnreadableError(reason)


nothing = partial(_fail, "there is no notebook. Hand in the file that ends in .ipynb")


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


MAX_FILES, MAX_NAME = 40, 200
Late = Literal["count", "ignore"]


@dataclass(frozen=True)
class Submission:
    """A file that was handed in for a notebook of the lab, "" if that is unknown.

    Its digest is SHA-256, so that a later version is graded again. `refused` says why it cannot be
    graded, or "": then it has no points, and stops nothing.
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
    late: Late = "count",
) -> list[Submission]:
    """Find all that was handed in, by student and notebook.

    A student is whom Moodle or Canvas name in a folder's or file's name, else a folder or zip in
    `folder`, or the beginning of a file's name: STUDENT--NOTEBOOK.ipynb, STUDENT_NOTEBOOK.ipynb.
    A file with the lab's own name belongs to the student after whom `folder` is named.

    Files after `due` get a flag "late", but for those in zips of Moodle and Canvas, which don't
    tell; to "ignore" `late` ones is to refuse them, so that an earlier one counts. Raise ValueError
    if there is no such folder, zip or notebook, or no notebook in it.
    """
    pristine = pristine_notebooks(notebooks)
    home = folder.resolve().name if folder.is_dir() else folder.resolve().parent.name
    others: dict[str, File] = {}  # of students without a notebook
    read: Counter[str] = Counter()
    found: list[Submission] = []
    for file in files_in(folder):
        owner = composed(file.path.split("/")[0])
        student = _student(owner, pristine, home)
        if _may_be_one(file.path):
            read[student] += 1
            if read[student] <= MAX_FILES:
                found.append(_read(file, student, pristine, due, late))
        elif "/" in file.path or origin_of(owner):
            others.setdefault(student, replace(file, read=nothing))
    for student in others.keys() - read.keys():
        found.append(_read(others[student], student, pristine, due, late))
    if not found:
        raise ValueError(f"there is no notebook (*.ipynb) in {folder}")
    return sorted(_newest(found), key=lambda one: (one.student, one.notebook, one.path))


def _student(owner: str, pristine: Mapping[str, Pristine], home: str) -> str:
    if origin := origin_of(owner):
        return origin.student
    if not _may_be_one(owner):
        return owner
    stem = owner[: owner.lower().rindex(".zip" if _is_zip(owner) else ".ipynb")]
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
    if printable(student + path) != student + path:
        return "its name holds characters that cannot be seen"
    if "\\" in student + path or student.startswith("-"):
        return "its name could be taken for a path or an option"
    if not student.strip() or any(len(part) > MAX_NAME for part in path.split("/")):
        return "its name is too long, or empty"
    return ""


def _read(
    file: File, student: str, pristine: Mapping[str, Pristine], due: datetime | None, late: Late
) -> Submission:
    digest, cells, flags = "", (), []
    notebook = next((name for name in pristine if name in file.path), "")
    path = composed(printable("/".join(part[:MAX_NAME] for part in file.path.split("/"))))
    if not (refused := _trick(student, file.path)):
        try:
            data = file.read()
            digest = hashlib.sha256(data).hexdigest()
            cells = parse(data)
            # The lab's notebook with which it shares most exercises and checks.
            given = {cell.grade_id for cell in cells} - {""}
            shared = [(len(given & {c.grade_id for c in p.cells}), n) for n, p in pristine.items()]
            notebook = max(shared)[1] if max(shared)[0] else notebook
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
    if flags and late == "ignore":
        refused = refused or "it came late"
    student, refused = printable(student), printable(refused)
    return Submission(student, notebook, path, digest, refused, cells, file.modified, tuple(flags))


def _newest(found: list[Submission]) -> Iterator[Submission]:
    """Yield the newest of several files for one notebook; a flag names the others.

    What an upgrade of the lab has put beside a copy counts only where the copy is missing, and a
    broken file does not take the place of a good one.
    """
    groups: dict[tuple[str, str], list[Submission]] = defaultdict(list)
    for one in found:
        groups[one.student, one.notebook].append(one)
    for group in groups.values():
        good = [one for one in group if not one.refused]
        works = [one for one in good if not lies_beside(one.path)] or good or group
        # Canvas counts files up; its zips give all of them the time of the download.
        newest = max(
            works, key=lambda o: (getattr(origin_of(o.path), "file", 0), str(o.modified), o.path)
        )
        texts = []
        if older := [one.path for one in works if one is not newest]:
            names = ", ".join(older[:5])
            texts = [f"Several files for this notebook; the newest counts. Ignored: {names}."]
            if not good:
                texts = [f"{len(older)} other files were refused, too: {names}."]
        texts += [
            f"{one.path} was refused ({one.refused}); this file was graded instead."
            for one in (group if good else ())
            if one.refused and not lies_beside(one.path)
            if not (one.modified and newest.modified and one.modified < newest.modified)
        ]
        flags = (Flag("", "duplicate", text) for text in texts[:5])
        yield replace(newest, flags=(*newest.flags, *flags))


def read_table(path: Path, *columns: str) -> list[dict[str, str]]:
    """Read a CSV file with commas or semicolons; raise ValueError if a column is missing."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8: save it as CSV UTF-8") from None
    header = text.split("\n", 1)[0]
    separator = ";" if header.count(";") > header.count(",") else ","
    rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, restval=""))
    if missing := [name for name in columns if rows and name not in rows[0]]:
        raise ValueError(f"{path} has no column {missing[0]!r}; its first line is {header.strip()}")
    kept = [{str(k): v for k, v in row.items() if isinstance(v, str)} for row in rows]
    return [{key: composed(value.strip()) for key, value in row.items()} for row in kept]


@dataclass(frozen=True)
class ClassList:
    """Rows of a file by student, as the lab calls them; the system is "Moodle", "Canvas" or ""."""

    system: str = ""
    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    def find(self, student: str, path: str) -> str | None:
        """Return the name in the list of who handed in this file; None if there is none."""
        if not self.system:
            return student if student in self.rows else None
        origin = origin_of(path)
        ending = f"_{origin.number}" if origin and origin.number else "\n"
        return next((one for one in self.rows if one.endswith(ending)), None)


NO_CLASS = ClassList()


def read_class(path: Path) -> ClassList:
    """Read Moodle's grading worksheet, Canvas's gradebook, or a table with a column "student"."""
    rows = read_table(path)
    columns, students = rows[0] if rows else {}, {}
    if "Identifier" in columns:
        for row in rows:
            if number := re.search(r"\d+$", row["Identifier"]):
                name = row.get("Full name", "").replace("_", " ") or "Participant"
                students[f"{name}_{number[0]}"] = row
        return ClassList("Moodle", students)
    if {"Student", "ID"} <= columns.keys():
        for row in rows:
            if row["ID"].isdigit():  # not the lines "Points Possible" and the like
                name = re.sub(r"[\s,.'’-]", "", row["Student"].lower())
                students[f"{name}_{row['ID']}"] = row
        return ClassList("Canvas", students)
    if "student" in columns:
        return ClassList("", {row["student"]: row for row in rows if row["student"]})
    raise ValueError(f"{path}: no column 'student' (nor Moodle's 'Identifier', nor Canvas's 'ID')")
