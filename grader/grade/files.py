"""Files that students handed in: in folders, or in zips as Moodle and Canvas make them."""

import contextlib
import io
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from grader.grade.notebooks import MAX_BYTES, UnreadableError

MAX_ZIP_BYTES = 100 * 2**20
# A zip is opened for each file, so that none stays in memory.
_Opened = Callable[[], zipfile.ZipFile]
# "Ada Lovelace_4711_assignsubmission_file/01.ipynb", or one file "…_file_01.ipynb".
_MOODLE = re.compile(r"(?P<student>.+?_\d+)_assignsubmission_[a-z]+(?:_|$)")
# "lovelaceada_LATE_123_9001_01.ipynb": the name without signs, Canvas's numbers of the student and
# of the file, the file's own name. "anon_x5Ab1_9001_01.ipynb" where grading is anonymous.
_CANVAS = re.compile(
    r"(?P<name>\w+?_)??(?P<late>LATE_)?(?P<id>anon_[0-9A-Za-z]+|(?<=_)\d+)_(?P<file>\d+)_."
)


@dataclass(frozen=True)
class Origin:
    """A name that Moodle or Canvas gave; Canvas numbers files, newer ones higher."""

    system: str
    student: str
    file: int = 0
    late: bool = False


def origin_of(path: str) -> Origin | None:
    """Return what Moodle or Canvas say with a file's path; None if it is not one of theirs."""
    name = path.split("/")[0]
    if found := _MOODLE.match(name):
        return Origin("Moodle", found["student"])
    if found := _CANVAS.match(name):
        student = (found["name"] or "") + found["id"]
        return Origin("Canvas", student, int(found["file"]), bool(found["late"]))
    return None


def is_notebook(name: str) -> bool:
    """Tell notebooks by their names; some browsers save them as text."""
    return name.lower().endswith((".ipynb", ".ipynb.txt", ".ipynb.json"))


def is_zip(name: str) -> bool:
    """Tell zips by their names."""
    return name.lower().endswith(".zip")


@dataclass(frozen=True)
class File:
    """Something handed in; in its path, a zip counts as a folder."""

    path: str
    read: Callable[[], bytes]
    modified: datetime | None = None


def files_in(given: Path) -> Iterator[File]:
    """Find everything in a folder, a zip or a single notebook; hidden files are left out.

    Raises:
        ValueError: there is no such folder or file.
    """
    if not given.is_dir():
        if not given.is_file() or not (is_notebook(given.name) or is_zip(given.name)):
            raise ValueError(f"{given} is no folder of submissions, no zip and no notebook")
        for file in _opened_if_zip(given, given.name, inner_zips=1):
            # In the download of a course, the names in it say whose the files are.
            yield replace(file, path=file.path.removeprefix(f"{given.name}/"))
        return
    for here, folders, names in os.walk(given):
        folders[:] = sorted(name for name in folders if not _hidden(name))
        if Path(here) == given:
            # Whoever has nothing else in their folder.
            yield from (File(f"{name}/", nothing) for name in folders)
        for name in sorted(names):
            path = Path(here, name)
            if not _hidden(name):
                yield from _opened_if_zip(path, path.relative_to(given).as_posix())


def _opened_if_zip(path: Path, name: str, inner_zips: int = 0) -> Iterator[File]:
    modified = datetime.fromtimestamp(path.lstat().st_mtime).astimezone()
    file = File(name, partial(_bytes_of, path), modified)
    if is_zip(name) and path.is_file() and not path.is_symlink():
        yield from _unzipped(file, partial(zipfile.ZipFile, path), inner_zips)
    else:
        yield file


def _unzipped(file: File, opened: _Opened, inner_zips: int) -> Iterator[File]:
    """Find the files in a zip; where that fails, reading the zip says why."""
    try:
        for member in opened().infolist():
            # Some programs on Windows write their own separators.
            path = member.filename.replace("\\", "/")
            if member.is_dir() or any(map(_hidden, path.split("/"))):
                continue
            modified = None
            with contextlib.suppress(ValueError):  # some zips hold no time
                modified = datetime(*member.date_time).astimezone()
            inner = File(f"{file.path}/{path}", partial(_member, opened, member), modified)
            if is_zip(path) and inner_zips:
                yield from _unzipped(inner, partial(_inner_zip, opened, member), inner_zips - 1)
            elif is_zip(path):
                yield replace(inner, read=partial(_fail, "it is a zip in a zip"))
            else:
                yield inner
    except (UnreadableError, zipfile.BadZipFile, OSError, ValueError) as error:
        yield replace(file, read=partial(_fail, f"the zip cannot be read: {error}"))


def _inner_zip(opened: _Opened, member: zipfile.ZipInfo) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(_member(opened, member, MAX_ZIP_BYTES)))


def _member(opened: _Opened, member: zipfile.ZipInfo, most: int = MAX_BYTES) -> bytes:
    _check_size(member.file_size, most)
    try:
        return opened().read(member)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError) as error:
        raise UnreadableError(f"the zip cannot be read: {error}") from error


def _bytes_of(path: Path) -> bytes:
    """Read a plain file; never through a symbolic link, never from a pipe."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UnreadableError("it is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError("it is not a plain file")
    _check_size(status.st_size)
    return path.read_bytes()


def _check_size(size: int, most: int = MAX_BYTES) -> None:
    if size > most:
        raise UnreadableError(
            f"it has {size / 2**20:.0f} MiB, and {most // 2**20} are allowed: "
            "clear the outputs and hand it in again"
        )


def _fail(reason: str) -> bytes:
    raise UnreadableError(reason)


nothing = partial(_fail, "there is no notebook")


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
