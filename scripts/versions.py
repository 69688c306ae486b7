"""With which versions the tests have passed: data/versions.csv, and the table of docs/versions.md.

As a plugin of pytest it adds the run to the file, once the run has ended:

    python -m pytest -p scripts.versions --record-versions -m "not slow and not browser"

As a program it writes the table again:

    python -m scripts.versions

A row is known by its Python (3.11), its packages' versions and its tests: a later run of the same
takes its place. A row without counts names a combination with which they have not all passed yet.
"""

import csv
import datetime
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "data" / "versions.csv"
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- versions: written by `python -m scripts.versions` -->\n", "<!-- versions end -->"
PACKAGES = {"torch": "PyTorch", "triton": "Triton", "transformers": "Transformers"}
KEY = ("python", *PACKAGES, "tests")
COUNTS = ("passed", "failed", "skipped")
COLUMNS = ("date", "commit", "system", *KEY, "marks", *COUNTS)
Row = dict[str, str]
COMMIT = pytest.StashKey[str]()


def key(row: Row) -> tuple[str, ...]:
    """The key by which a later run replaces a row: Python's minor version, versions, tests."""
    python = ".".join(row["python"].split(".")[:2])
    return (python, *(row[name].split("+")[0] for name in PACKAGES), row["tests"])


def read(path: Path = RECORD) -> list[Row]:
    """The rows of the record, in its order."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def add(row: Row, path: Path = RECORD) -> None:
    """Put a row into the record (if it exists), in place of that with the same key, sorted."""
    rows = [old for old in (read(path) if path.exists() else []) if key(old) != key(row)]
    rows = sorted([*rows, row], key=_order)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _order(row: Row) -> list[object]:
    numbers = [[int(n) for n in part.split(".") if n.isdigit()] for part in key(row)[:-1]]
    python, torch, triton, transformers = numbers
    return [torch, python, triton, transformers, row["tests"]]


def table(rows: list[Row]) -> str:
    """The rows as the page shows them, in Markdown."""
    lines = [
        f"| Python | {' | '.join(PACKAGES.values())} | tests | passed | failed | date |",
        "| --- " * (len(PACKAGES) + 5) + "|",
    ]
    for row in rows:
        python, *versions, tests = key(row)
        cells = [python, *(v or "none" for v in versions), f"`{tests}`"]
        if row["passed"]:
            cells += [f"{int(row['passed']):,}", row["failed"], row["date"]]
        else:
            cells += ["", "", "not all passed yet"]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def with_table(text: str, rows: list[Row]) -> str:
    """The page's text with the table of these rows; a ValueError if a mark is missing."""
    head, found, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"docs/versions.md lacks {BEGIN.strip()} or {END}, around the table")
    return f"{head}{BEGIN}\n{table(rows)}\n{END}{tail}"


def installed(name: str) -> str:
    """The version of a package in this environment; empty if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that turns recording on."""
    words = "add this run's versions and counts to a CSV file (data/versions.csv)"
    record = {"nargs": "?", "const": str(RECORD), "metavar": "FILE", "help": words}
    parser.addoption("--record-versions", **record)


def pytest_configure(config: pytest.Config) -> None:
    """Note the commit before the tests: a long run may see the next one made."""
    if config.getoption("--record-versions"):
        config.stash[COMMIT] = _commit()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Record a run that came to its end, passed or not."""
    path = config.getoption("--record-versions")
    if not path:
        return
    # What could not be collected could not be counted; with workers that looks like a failed test.
    errors = terminalreporter.stats.get("error", [])
    whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if not whole or any(isinstance(report, pytest.CollectReport) for report in errors):
        terminalreporter.write_line("nothing recorded: not all tests could be run")
        return
    stats = {name: len(reports) for name, reports in terminalreporter.stats.items()}
    counts = (
        stats.get("passed", 0),
        stats.get("failed", 0) + stats.get("error", 0),
        stats.get("skipped", 0),
    )
    row = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": config.stash[COMMIT],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
        "tests": " ".join(config.args),
        "marks": config.getoption("markexpr"),
        **dict(zip(COUNTS, map(str, counts), strict=True)),
    }
    add(row, Path(path))
    terminalreporter.write_line(f"recorded in {path}: {counts[0]} passed, {counts[1]} failed")


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
    sys.stdout.write(table(read()))
