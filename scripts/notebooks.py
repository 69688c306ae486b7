"""Keep the notebooks and their text twins together, and run them.

    python scripts/notebooks.py check        fail if a notebook and its twin differ
    python scripts/notebooks.py sync         carry the newer of the two into the older
    python scripts/notebooks.py run [NAME..] sync, run from top to bottom, store the outputs

NAME is the beginning of a notebook's file name, such as 01 or backward; without it, all are run.
"""

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs
from jupytext.config import load_jupytext_config
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
CELL_TIMEOUT = 600
WIDGET = "Controls stand here while the notebook runs."


def read(path: Path) -> NotebookNode:
    """Read a notebook or a twin, with the settings of the jupytext.toml beside it."""
    return jupytext.read(path, config=load_jupytext_config(str(path)))


def twin_text(notebook: NotebookNode, path: Path) -> str:
    """The twin that belongs to a notebook, as text."""
    return jupytext.writes(notebook, fmt="py:percent", config=load_jupytext_config(str(path)))


def describe(notebook: NotebookNode) -> list[str]:
    """The lines on which notebook and twin must agree: types, sources, nbgrader and tags."""
    lines = []
    for cell in notebook.cells:
        kept = {key: cell.metadata[key] for key in ("nbgrader", "tags") if cell.metadata.get(key)}
        lines.append(f"[{cell.cell_type}] {json.dumps(kept, sort_keys=True)}")
        lines += cell.source.rstrip().split("\n")
    return lines


def twins(folder: Path) -> list[Path]:
    """The text twins in a folder of notebooks: the ordered ones, then those of `further/`."""
    return [*sorted(folder.glob("*.py")), *sorted(folder.glob("further/*.py"))]


def differences(folder: Path = NOTEBOOKS) -> list[str]:
    """Return a message for each twin whose notebook differs."""
    out = []
    for twin in twins(folder):
        notebook = twin.with_suffix(".ipynb")
        sides = describe(read(notebook)), describe(read(twin)), notebook.name, twin.name
        if changed := list(difflib.unified_diff(*sides, lineterm="", n=1)):
            out.append("\n".join([f"{twin.stem}: notebook and twin differ", *changed[:40]]))
    return out


def write_pair(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook (changed in place) and its twin, so that a diff shows real changes only."""
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        cell.metadata = NotebookNode(
            {key: cell.metadata[key] for key in ("nbgrader", "tags") if cell.metadata.get(key)}
        )
        if cell.cell_type == "code":
            cell.outputs = [_normalised(output) for output in cell.outputs if not _volatile(output)]
    twin = path.with_suffix(".py")
    twin.write_text(_formatted(twin_text(notebook, path), twin), encoding="utf-8")
    # The formatter may have changed code, too: the notebook follows its twin.
    used: dict[str, int] = {}
    for cell, formatted in zip(notebook.cells, read(twin).cells, strict=True):
        cell.source = formatted.source
        # The twin does not carry ids: derive them from the text instead of drawing them.
        name = hashlib.sha256(f"{cell.cell_type} {cell.source}".encode()).hexdigest()[:8]
        used[name] = used.get(name, 0) + 1
        cell.id = name if used[name] == 1 else f"{name}-{used[name]}"
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    # Both get one time stamp, or an editor would think that one of them is newer.
    now = time.time()
    os.utime(path, (now, now))
    os.utime(twin, (now, now))


def _formatted(text: str, twin: Path) -> str:
    """The twin as `ruff format` wants it; unchanged where ruff is missing or cannot parse it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(twin), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT)
    return done.stdout if done.returncode == 0 else text


def _volatile(output: NotebookNode) -> bool:
    """Tell whether an output is a progress bar: its speed and time are never the same twice."""
    if output.output_type == "stream":
        return output.name == "stderr" and "\r" in output.text
    text = output.get("data", {}).get("text/plain", "")
    return bool(re.match(r"\s*\d+%\|", text))


def _normalised(output: NotebookNode) -> NotebookNode:
    """Take out of an output what belongs to this machine and this run."""
    if "text" in output:
        output.text = _anonymous(output.text)
    data: Any = output.get("data", {})
    if data.pop("application/vnd.jupyter.widget-view+json", None):
        # What is left would be the widget's repr, which tells a reader nothing.
        data["text/plain"] = WIDGET
    for kind in ("text/plain", "text/html", "text/markdown"):
        if kind in data:
            data[kind] = _anonymous(data[kind])
    return output


def _anonymous(text: str) -> str:
    text = text.replace(f"{ROOT}/", "").replace(str(ROOT), ".").replace(str(Path.home()), "~")
    return re.sub(r"\S*/ipykernel_\d+/\d+\.py", "<cell>", text)


def sync(folder: Path = NOTEBOOKS) -> None:
    """Carry the newer of notebook and twin into the other; outputs of unchanged cells stay.

    A new notebook begins as a twin.
    """
    for twin in twins(folder):
        path = twin.with_suffix(".ipynb")
        if not path.exists():
            notebook, done = read(twin), "notebook made from the twin"
        elif describe(read(path)) == describe(read(twin)):
            continue
        elif twin.stat().st_mtime >= path.stat().st_mtime:
            notebook = combine_inputs_with_outputs(read(twin), read(path))
            done = "twin carried into the notebook"
        else:
            notebook, done = read(path), "notebook carried into the twin"
        write_pair(notebook, path)
        print(f"{twin.stem}: {done}")


def execute(path: Path) -> None:
    """Run a notebook from top to bottom, in its folder, and store the outputs in it.

    Raises:
        CellExecutionError: a cell failed; the file is left as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    options = {"kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, timeout=CELL_TIMEOUT, resources=folder, **options).execute()
    write_pair(notebook, path)


def run(names: list[str], folder: Path = NOTEBOOKS) -> None:
    """Sync, then execute the notebooks whose names begin with one of `names`; all if empty."""
    sync(folder)
    for path in [twin.with_suffix(".ipynb") for twin in twins(folder)]:
        if names and not path.name.startswith(tuple(names)):
            continue
        began = time.perf_counter()
        print(f"{path.stem}: running", flush=True)
        execute(path)
        print(f"{path.stem}: done in {time.perf_counter() - began:.0f} s")


def main() -> None:
    """Read the command line and do it; see the top of this file."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("command", choices=["check", "sync", "run"])
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    if options.command == "check":
        found = differences()
        sys.exit("\n\n".join([*found, "`make format` carries the newer over"]) if found else 0)
    try:
        sync() if options.command == "sync" else run(options.names)
    except CellExecutionError as error:
        sys.exit(f"a cell failed; nothing was stored\n{error}")


if __name__ == "__main__":
    main()
