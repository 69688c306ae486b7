"""Recorded measurements: data/runs/<name>/results.csv with its provenance.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labsupport.paths import data_dir

if TYPE_CHECKING:
    import pandas as pd


def runs_dir() -> Path:
    """data/runs, the folder of recorded runs."""
    return data_dir() / "runs"


def save_run(
    table: pd.DataFrame, name: str, *, folder: Path | None = None, overwrite: bool = False
) -> Path:
    """Write a table and its provenance; returns the new folder.

    Args:
        table: as `run_grid` returns it, with `.attrs["provenance"]`.
        name: letters, digits, '-', '_' and '.', for example 'h200-forward'.
        folder: where to put it; data/runs by default.
        overwrite: replace a run of that name.

    Raises:
        ValueError: a bad name, or a table without provenance.
        FileExistsError: the run exists and `overwrite` is False.

    >>> import pathlib, tempfile
    >>> table = run_grid(grid(["sdpa_flash"], [64]), repeats=3, progress=False)
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> saved = save_run(table, "mine", folder=folder)
    >>> len(load_run("mine", folder=folder))
    1
    """
    check_run_name(name)
    record = table.attrs.get("provenance")
    if not record:
        raise ValueError(
            "this table has no provenance in .attrs['provenance'], so nobody could repeat it: "
            "save the table that run_grid returned"
        )
    target = (runs_dir() if folder is None else folder) / name
    if (target / "results.csv").exists() and not overwrite:
        raise FileExistsError(f"{target} exists: choose another name, or pass overwrite=True")
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2, ensure_ascii=False, sort_keys=True)
    (target / "provenance.json").write_text(text + "\n", encoding="utf-8")
    table.to_csv(target / "results.csv", index=False)
    return target


def load_run(name: str, *, folder: Path | None = None) -> pd.DataFrame:
    """A recorded run, its provenance in `.attrs["provenance"]`, marked as recorded.

    Raises:
        FileNotFoundError: no such run; the message lists those that exist.

    >>> load_run("attention-h200").attrs["provenance"]["device"]
    'NVIDIA H200'
    """
    import pandas as pd

    check_run_name(name)
    root = runs_dir() if folder is None else folder
    path = root / name / "results.csv"
    if not path.exists():
        raise FileNotFoundError(
            f"no recorded run {name!r} in {root}; there are: {', '.join(list_runs(root)) or 'none'}"
        )
    table = pd.read_csv(path, keep_default_na=True)
    for column in ("reason", "kernel"):
        if column in table:
            table[column] = table[column].astype(object).fillna("")
    text = (root / name / "provenance.json").read_text(encoding="utf-8")
    record: dict[str, Any] = json.loads(text)
    table.attrs["provenance"] = record | {"recorded": True, "run": name}
    return table


def list_runs(folder: Path | None = None) -> list[str]:
    """Names of the recorded runs."""
    root = runs_dir() if folder is None else folder
    return sorted(path.parent.name for path in root.glob("*/results.csv"))


def check_run_name(name: str) -> str:
    """Return the name; raise ValueError if it cannot be a run's."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"{name!r} is no name for a run: use letters, digits, '-', '_' and '.'")
    return name
