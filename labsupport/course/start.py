"""Working copies of the student edition, which belong to the student from then on.

Where the lab has moved on since a copy was made, the newer edition is merged into it, cell by cell
(`labsupport.course.merge`). First the student's file is saved beside, as it was; so nothing is
lost. A file that is not ours, or that cannot be read, is left alone.

The checklist is treated likewise: boxes of a newer edition are added to the student's copy, and no
line of theirs is touched.

The theory appears in the student's folder as a link to the project's, because JupyterLab opens
nothing outside of the folder that it was started in. A link that leads nowhere, as after a move to
another Python, is replaced.
"""

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from labsupport import paths
from labsupport.course import checklist, merge
from labsupport.course import editions as release
from labsupport.course.files import OLDER_EDITION, replace, write_new
from labsupport.paths import STATE_FILE


class Upgrade(NamedTuple):
    """A copy into which a newer edition was merged, and the file with its old version."""

    copy: Path
    before: Path
    conflicts: tuple[str, ...]  # what could not be kept in its place, one sentence each


@dataclass
class StartReport:
    """Files that `start_work` found in the student's folder, or created there."""

    folder: Path
    created: list[Path] = field(default_factory=list)  # new working copies
    kept: list[Path] = field(default_factory=list)  # copies that were left as they are
    upgraded: list[Upgrade] = field(default_factory=list)  # a newer edition was merged into them
    left_alone: dict[Path, str] = field(default_factory=dict)  # cannot be read, and why

    def lines(self) -> list[str]:
        """The report for people, a line for each file and each conflict."""
        out = [f"created: {path}" for path in self.created]
        out += [f"kept:    {path} (yours, unchanged)" for path in self.kept]
        out += [f"left alone: {path}: {reason}" for path, reason in self.left_alone.items()]
        for upgrade in self.upgraded:
            out.append(f"renewed: {upgrade.copy} (a newer edition, with your work in it)")
            out.append(f"         as it was before: {upgrade.before}")
            out += [f"         look at: {conflict}" for conflict in upgrade.conflicts]
        return out


def _links_within_the_folder(text: str) -> str:
    """Take one `../` out of links to theory/, which a student's folder holds itself."""
    return re.sub(r"\]\(\.\./((?:\.\./)*theory/)", r"](\1", text)


def _start_one(source: Path, report: StartReport, editions: dict[str, str]) -> None:
    copy = report.folder / release.name_of(source)
    # The recipe counts as well as the ingredients: another stub makes another edition.
    recipe = Path(release.__file__).read_bytes()
    key = hashlib.sha256(recipe + source.read_bytes()).hexdigest()
    if not copy.exists():
        edition = release.make_edition(source)
        copy.parent.mkdir(exist_ok=True)
        write_new(copy, _links_within_the_folder(edition.text))
        editions[key] = edition.identifier
        report.created.append(copy)
        return
    if key not in editions:
        editions[key] = release.make_edition(source).identifier
    try:
        was = copy.read_bytes()
        mine: Any = json.loads(was)
        if merge.edition_of(mine) in (None, editions[key]):
            report.kept.append(copy)
            return
        newer = json.loads(_links_within_the_folder(release.make_edition(source).text))
        merged = merge.merge(mine, newer)
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).split("\n")[0]
        report.left_alone[copy] = f"it cannot be read as a notebook ({reason})"
        return
    # In ASCII: half of a character, as some editors leave it, has an escape only.
    text = json.dumps(merged.notebook, indent=1) + "\n"
    before = _keep(copy, was, editions[key])
    replace(copy, text)
    report.upgraded.append(Upgrade(copy, before, merged.conflicts))


def _start_checklist(source: Path, report: StartReport, editions: dict[str, str]) -> None:
    copy = report.folder / checklist.FILE
    text = checklist.students_copy(source.read_text(encoding="utf-8"))
    edition = hashlib.sha256(text.encode()).hexdigest()[:12]
    if not copy.exists():
        write_new(copy, text)
        report.created.append(copy)
    # Asked once for each edition: a box that the student removed does not come back every time.
    elif editions.get(checklist.FILE) == edition:
        report.kept.append(copy)
    else:
        try:
            was = copy.read_bytes()
            renewed, added = checklist.with_new_items(was.decode("utf-8-sig"), text)
        except (OSError, ValueError) as error:
            report.left_alone[copy] = f"it cannot be read as text ({error})"
            return
        if not added:
            report.kept.append(copy)
        else:
            before = _keep(copy, was, edition)
            replace(copy, renewed)
            report.upgraded.append(Upgrade(copy, before, ()))
    editions[checklist.FILE] = edition


def _keep(copy: Path, was: bytes, edition: str) -> Path:
    """Save what a copy held before its upgrade in a new file beside it."""
    stem, number = f"{copy.stem}{OLDER_EDITION}{edition[:8]}", 1
    before = copy.with_stem(stem)
    while before.exists():
        number += 1
        before = copy.with_stem(f"{stem}-{number}")
    write_new(before, was)
    return before


def start_work(to: Path | None = None, notebooks: Path | None = None) -> StartReport:
    """Give the student a copy of each notebook and of the checklist, and update older ones.

    To start a notebook again, a student renames or deletes their copy and starts again.

    Args:
        to: the student's folder, created if need be; `paths.work_dir()` if None.
        notebooks: the folder of the solved notebooks; the lab's own if None.

    Raises:
        ValueError: `to` is the folder of the solved notebooks, or is a file.
        labsupport.course.editions.ReleaseError: a notebook has no student edition.
    """
    sources = release.solved_notebooks(notebooks)
    folder = paths.work_dir() if to is None else to
    if folder.resolve() == sources[0].parent.resolve():
        raise ValueError(f"{folder} holds the solved notebooks; choose another folder")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    # The editions of earlier starts: this spares the work of making one (and importing nbgrader)
    # just to find that nothing changed. Losing it costs time, nothing else.
    report, memory, editions = StartReport(folder), folder / STATE_FILE, {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        editions = dict(json.loads(memory.read_text(encoding="utf-8"))["editions"])
    known = dict(editions)
    for source in sources:
        _start_one(source, report, editions)
    theory = sources[0].parent.resolve().parent / "theory"
    if (theory / "checklists.md").is_file():
        _start_checklist(theory / "checklists.md", report, editions)
    if theory.is_dir() and not (folder / "theory").exists():
        link = folder.resolve() / "theory"
        # Where links are not allowed (Windows without developer mode), it stays in the project.
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(theory, link.parent), target_is_directory=True)
    if editions != known or not memory.exists():
        replace(memory, json.dumps({"editions": editions}, indent=1, sort_keys=True) + "\n")
    return report
