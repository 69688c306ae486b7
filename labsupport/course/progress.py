"""A student's progress: exercises, their checks, and points.

Two answers to that. `progress_of_folder` reads saved notebooks, and runs nothing: a check counts if
its cell is the lab's, and the output saved with it says `[ok]` and holds no error. It is as true as
the notebook is up to date: a solution that was changed and not run again is not noticed.
`show_progress` runs the checks again in the kernel from which it is called, on what is defined
there now. Neither decides a grade.
"""

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labsupport import paths
from labsupport.course import editions
from labsupport.course.files import lies_beside
from labsupport.course.merge import edition_of, source_hash, source_of

PASSED, FAILED, NOT_RUN, NOT_WRITTEN = "passed", "not passed", "not run", "not written"


@dataclass(frozen=True)
class CheckState:
    """One check cell: its exercise, its points and its state."""

    exercise: str
    points: float
    status: str


@dataclass
class Progress:
    """A student's progress.

    Attributes:
        checks: by notebook ("01-Title", "further/backward"), in the notebook's order.
        troubles: what could not be read, one sentence each.
    """

    checks: dict[str, list[CheckState]] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return a table: exercise, points, check cells passed, and how the others stand."""
        out: list[str] = []
        for notebook, checks in self.checks.items():
            out += [notebook, *_table(checks), ""]
        if len(self.checks) != 1:
            for what, bonus in (("the course", False), ("further", True)):
                rows = [
                    c
                    for n, checks in self.checks.items()
                    for c in checks
                    if bonus == n.startswith("further/")
                ]
                if rows or not bonus:
                    out.append(f"{what}: {_points(rows)} {'bonus ' * bonus}points")
        return out + self.troubles


def _points(checks: Iterable[CheckState]) -> str:
    checks = list(checks)
    earned = sum(check.points for check in checks if check.status == PASSED)
    return f"{earned:g} of {sum(check.points for check in checks):g}"


def _table(checks: list[CheckState]) -> list[str]:
    exercises = list(dict.fromkeys(check.exercise for check in checks))
    width = max((len(name_of(exercise)) for exercise in exercises), default=0)
    out = []
    for exercise in exercises:
        own = [check for check in checks if check.exercise == exercise]
        rest = [check.status for check in own if check.status != PASSED]
        others = f"   ({', '.join(dict.fromkeys(rest))})" if rest else ""
        out.append(
            f"  {name_of(exercise):{width}}   {_points(own):>7} points   "
            f"{len(own) - len(rest)} of {len(own)} check cells{others}"
        )
    return [*out, f"  {'together':{width}}   {_points(checks):>7} points"]


def name_of(exercise: str) -> str:
    """Return an exercise's readable name: "ex-1-3-online-softmax" is "1-3 online softmax"."""
    parts = exercise.removeprefix("ex-").split("-")
    return f"{'-'.join(parts[:2])} {' '.join(parts[2:])}".strip()


def _checks_of(cells: list[Any], status: Callable[[dict[str, Any]], str]) -> list[CheckState]:
    roles = [(cell, cell.get("metadata", {}).get("nbgrader", {})) for cell in cells]
    solutions = [str(about.get("grade_id")) for _, about in roles if about.get("solution")]
    found = []
    for cell, about in roles:
        if not about.get("grade") or about.get("solution"):
            continue
        name = str(about.get("grade_id"))
        # The longest that fits: ex-1-1-a-b-values belongs to ex-1-1-a-b, not to ex-1-1-a.
        fitting = [solution for solution in solutions if name.startswith(f"{solution}-")]
        exercise = max(fitting, key=len, default=name)
        found.append(CheckState(exercise, float(about.get("points") or 0), status(cell)))
    return found


# --- saved notebooks ------------------------------------------------------------------------------


def progress_of_folder(folder: Path | None = None) -> Progress:
    """Read the progress from the saved notebooks of a folder; nothing is run.

    Args:
        folder: of the student's copies; `paths.work_dir()` if None.

    Raises:
        ValueError: there is no such folder, or no notebook of the lab in it.
    """
    folder = paths.work_dir() if folder is None else folder
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; `labsupport start` makes your copies")
    progress = Progress()
    for file in paths.notebooks_in(folder):
        if lies_beside(file.name):
            continue
        try:
            notebook = json.loads(file.read_bytes())
            edition = edition_of(notebook)
            if edition is None:
                continue  # a notebook of the student's own
            hashes = notebook["metadata"]["labsupport"].get("cells", {})
            checks = _checks_of(notebook["cells"], lambda cell, h=hashes: _saved_status(cell, h))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            progress.troubles.append(f"{file}: cannot be read as a notebook ({error})")
            continue
        progress.checks[editions.name_of(file).removesuffix(".ipynb")] = checks
    if not progress.checks and not progress.troubles:
        raise ValueError(f"{folder} holds no notebook of the lab; `labsupport start` makes them")
    return progress


def _saved_status(cell: dict[str, Any], hashes: Mapping[str, str]) -> str:
    known = hashes.get(cell.get("id", ""))
    if known is not None and known != source_hash(source_of(cell)):
        return "check was changed"
    outputs = cell.get("outputs") or []
    if any(output.get("output_type") == "error" for output in outputs):
        said = "".join(str(output.get("evalue", "")) for output in outputs)
        return NOT_WRITTEN if "is not written yet" in said else FAILED
    said = "".join("".join(output.get("text", "")) for output in outputs)
    return PASSED if "[ok]" in said else NOT_RUN


# --- the running kernel ---------------------------------------------------------------------------


def show_progress(notebook: str, names: Mapping[str, Any]) -> None:
    """Print which exercises of a notebook pass their checks now, and their points.

    The check cells of the lab's own notebook run once more, silently, on a copy of `names`.

    Args:
        notebook: how its file's name begins, such as "01" or "backward".
        names: the notebook's variables: `globals()`.
    """
    try:
        sources = paths.notebooks_in(paths.notebooks_dir())
        (file,) = (path for path in sources if path.name.startswith(notebook))
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    except (paths.ProjectNotFoundError, OSError, ValueError, KeyError) as error:
        print(f"Your progress cannot be shown: the lab's own notebook is not there ({error}).")
        return
    checks = _checks_of(cells, lambda cell: _status_now(source_of(cell), names))
    print("\n".join(_table(checks)))


def _status_now(source: str, names: Mapping[str, Any]) -> str:
    # The lab's own copy may be the solved one; students' cells hold the visible part only.
    hidden = r"^[^\n]*BEGIN HIDDEN TESTS.*?END HIDDEN TESTS[^\n]*$"
    visible = re.sub(hidden, "", source, flags=re.MULTILINE | re.DOTALL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(compile(visible, "<check>", "exec"), dict(names))
    except NameError:
        return NOT_RUN  # a cell that it needs was not run
    except Exception as error:
        return NOT_WRITTEN if "is not written yet" in str(error) else FAILED
    return PASSED
