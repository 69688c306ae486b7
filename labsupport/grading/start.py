"""Working copies of the student edition, which belong to the student from then on.

Nothing that exists is ever overwritten. Where the lab has moved on since a copy was made, the
newer edition is put beside the copy under a name of its own, and the student decides.

The theory appears in the student's folder as a link to the project's, because JupyterLab opens
nothing outside of the folder that it was started in.
"""

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labsupport import paths
from labsupport.grading import release
from labsupport.grading.files import replace, write_new

STATE_FILE = ".labsupport.json"


@dataclass
class StartReport:
    """What `start_work` found and did.

    Attributes:
        folder: the student's folder.
        created: new working copies.
        kept: copies that were there already.
        newer: for a copy of an older edition, where the newer one lies.
    """

    folder: Path
    created: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)
    newer: dict[Path, Path] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The report for people, a line for each file."""
        out = [f"created: {path}" for path in self.created]
        for path in self.kept:
            out.append(f"kept:    {path} (yours, unchanged)")
            if path in self.newer:
                out.append(f"         the lab has a newer edition of it: {self.newer[path]}")
        return out


class _State:
    """What the folder remembers between two starts. Losing it costs time, nothing else.

    `editions` spares the work of making an edition (and importing nbgrader) just to find that
    nothing changed. `offered` keeps a newer edition that the student deleted from coming back.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / STATE_FILE
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            stored = None
        if not isinstance(stored, dict):
            stored = {}
        self.editions: dict[str, str] = dict(stored.get("editions", {}))
        self.offered: list[str] = list(stored.get("offered", []))
        self._stored = self._text()

    def _text(self) -> str:
        content = {"editions": self.editions, "offered": self.offered}
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def save(self) -> None:
        if not self.path.exists() or self._text() != self._stored:
            replace(self.path, self._text())


def _source_key(source: Path) -> str:
    # The recipe counts as well as the ingredients: another stub makes another edition.
    recipe = Path(release.__file__).read_bytes()
    return hashlib.sha256(recipe + source.read_bytes()).hexdigest()


def _edition_of(copy: Path) -> str | None:
    """Which edition a working copy came from; None if it does not say."""
    try:
        notebook: Any = json.loads(copy.read_text(encoding="utf-8"))
        return str(notebook["metadata"]["labsupport"]["edition"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _links_within_the_folder(text: str) -> str:
    """From notebooks/ the theory is ../theory/, from the student's folder it is theory/."""
    return text.replace("](../theory/", "](theory/")


def _link_theory(folder: Path, theory: Path) -> None:
    if not theory.is_dir() or (folder / "theory").exists():
        return
    # Where links are not allowed (Windows without developer mode), the theory is in the project.
    with contextlib.suppress(OSError):
        (folder / "theory").symlink_to(os.path.relpath(theory, folder), target_is_directory=True)


def _start_one(source: Path, report: StartReport, state: _State) -> None:
    copy = report.folder / source.name
    key = _source_key(source)
    if not copy.exists():
        edition = release.make_edition(source)
        write_new(copy, _links_within_the_folder(edition.text))
        state.editions[key] = edition.identifier
        report.created.append(copy)
        return

    report.kept.append(copy)
    if key not in state.editions:
        state.editions[key] = release.make_edition(source).identifier
    current, own = state.editions[key], _edition_of(copy)
    if own is None or own == current:
        return
    beside = copy.with_name(f"{copy.stem}.new-edition-{current[:8]}.ipynb")
    if not beside.exists() and current not in state.offered:
        write_new(beside, _links_within_the_folder(release.make_edition(source).text))
        state.offered.append(current)
    if beside.exists():
        report.newer[copy] = beside


def start_work(to: Path | None = None, notebooks: Path | None = None) -> StartReport:
    """Give the student a working copy of every notebook that they do not have yet.

    To begin a notebook anew, a student renames or deletes their copy and starts again.

    Args:
        to: the student's folder, created if need be; `work/` in the project if None.
        notebooks: the folder of the solved notebooks; the lab's own if None.

    Returns:
        what was created, what was kept, and where newer editions lie.

    Raises:
        ValueError: `to` is the folder of the solved notebooks, or is a file.
        labsupport.grading.release.ReleaseError: a notebook has no student edition.
        OSError: the folder cannot be written to.
    """
    sources = release.solved_notebooks(notebooks)
    folder = paths.project_root() / "work" if to is None else to
    if folder.resolve() == sources[0].parent.resolve():
        raise ValueError(f"{folder} holds the solved notebooks; choose another folder with --to")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --to wants a folder")
    folder.mkdir(parents=True, exist_ok=True)
    report, state = StartReport(folder), _State(folder)
    for source in sources:
        _start_one(source, report, state)
    _link_theory(folder.resolve(), sources[0].parent.resolve().parent / "theory")
    state.save()
    return report
