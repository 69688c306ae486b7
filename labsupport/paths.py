"""Where things are: the project's folders, and a cache outside of it.

The notebooks and `data/` stand beside the package in the project folder, so labsupport
has to be installed from there in editable mode, which is what `make lab` does.
"""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


class ProjectNotFoundError(RuntimeError):
    """The folder with the notebooks and the data cannot be found from this installation."""


def project_root() -> Path:
    """The project folder: the one that holds `notebooks/`, `data/` and `pyproject.toml`.

    The environment variable LABSUPPORT_ROOT names it where the package is installed elsewhere.

    Raises:
        ProjectNotFoundError: the package was installed as a copy, away from the project, or
            LABSUPPORT_ROOT names a folder that is not the project.
    """
    named = os.environ.get("LABSUPPORT_ROOT")
    root = Path(named).expanduser().resolve() if named else _PACKAGE.parent
    if (root / "pyproject.toml").is_file() and (root / "labsupport").is_dir():
        return root
    if named:
        raise ProjectNotFoundError(
            f"LABSUPPORT_ROOT is {named!r}, which is not the lab's project folder: it has no "
            "pyproject.toml beside a labsupport folder"
        )
    raise ProjectNotFoundError(
        f"labsupport is installed as a copy in {_PACKAGE}, away from its notebooks and data. "
        "Install it from the project folder with `make lab` or `pip install -e .`, or name that "
        "folder in the environment variable LABSUPPORT_ROOT"
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
