"""Locations: the project's folders, the student's, and a cache outside of both.

In a checkout the notebooks, `theory/` and `data/` stand beside the package; a wheel carries them
inside of it, in `labsupport/project/`.
"""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
STATE_FILE = ".labsupport.json"  # in a student's folder: what `labsupport start` remembers
_INSTALLED = _PACKAGE / "project"  # in a wheel: pyproject.toml puts it there


class ProjectNotFoundError(RuntimeError):
    """The folder with the notebooks and the data cannot be found from this installation."""


def project_root() -> Path:
    """Return the folder that holds `notebooks/`, `theory/` and `data/`.

    That is the one of the environment variable LABSUPPORT_ROOT if it is set, else the checkout,
    else what a wheel installed.

    Raises:
        ProjectNotFoundError: the package was copied without its files, or LABSUPPORT_ROOT names a
            folder that is not the project.
    """
    named = os.environ.get("LABSUPPORT_ROOT")
    root = Path(named).expanduser().resolve() if named else _PACKAGE.parent
    if (root / "pyproject.toml").is_file() and (root / "labsupport").is_dir():
        return root
    if not named and _INSTALLED.is_dir():
        return _INSTALLED
    if named:
        raise ProjectNotFoundError(
            f"LABSUPPORT_ROOT is {named!r}, which is not the lab's project folder: it has no "
            "pyproject.toml beside a labsupport folder"
        )
    raise ProjectNotFoundError(
        f"labsupport lies in {_PACKAGE}, away from its notebooks and data. Install its wheel, or "
        "the project folder with `make lab` or `pip install -e .`; or name that folder in the "
        "environment variable LABSUPPORT_ROOT"
    )


def data_dir() -> Path:
    """`data/`: hardware figures, published figures and recorded runs.

    Raises:
        ProjectNotFoundError: as in `project_root`.
    """
    return project_root() / "data"


def notebooks_dir() -> Path:
    """`notebooks/`: the notebooks with their solutions.

    Raises:
        ProjectNotFoundError: as in `project_root`.
    """
    return project_root() / "notebooks"


def notebooks_in(folder: Path) -> list[Path]:
    """Return a folder's notebooks: the ordered ones, then those of `further/`, each by name."""
    return [*sorted(folder.glob("*.ipynb")), *sorted(folder.glob("further/*.ipynb"))]


def work_dir() -> Path:
    """Return the student's folder: `work/` in the checkout; installed, in the current folder.

    If installed, it may be the current folder itself, as in a terminal of JupyterLab.

    Raises:
        ProjectNotFoundError: as in `project_root`.
    """
    root = project_root()
    if root != _INSTALLED:
        return root / "work"
    return Path() if Path(STATE_FILE).exists() else Path("work")


def cache_dir() -> Path:
    """A folder of the user, outside the project, for what can be fetched or computed again.

    `$LABSUPPORT_CACHE` if set, else `labsupport` in `$XDG_CACHE_HOME` or in `~/.cache`. It is
    created if it does not exist.

    Raises:
        OSError: it cannot be created.
    """
    named = os.environ.get("LABSUPPORT_CACHE")
    if named:
        folder = Path(named).expanduser()
    else:
        # The XDG specification says that a relative path is to be ignored.
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (base if base.is_absolute() else Path.home() / ".cache") / "labsupport"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
