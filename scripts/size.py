"""Lines, files and statements of the project's Python, room by room.

python scripts/size.py --save data/upkeep/NAME.csv
"""

from __future__ import annotations

import argparse
import ast
import csv
import subprocess
import sys
from collections import defaultdict
from pathlib import Path


def room_of(path: Path) -> str:
    """Return the top folder of a file, within labsupport and tests the folder below."""
    parts = path.parts[:-1]
    return "/".join(parts[: 2 if parts[:1] in (("labsupport",), ("tests",)) else 1]) or "."


def sizes(root: Path) -> list[dict[str, str | int]]:
    """Count the Python files that git tracks: one row a room, and the sums.

    Returns:
        room, files, lines (all of them), statements (`ast.stmt`, docstrings included).
    """
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        text = (root / name).read_text(encoding="utf-8")
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
        room = room_of(Path(name))
        sums = [room, "all"]
        sums += ["labsupport, all"] if room.startswith("labsupport") else []
        sums += ["all but tests and notebooks"] if not room.startswith(("tests", "note")) else []
        for key in sums:
            for index, value in enumerate((1, text.count("\n"), statements)):
                rooms[key][index] += value
    return [
        dict(zip(("room", "files", "lines", "statements"), (room, *counts), strict=True))
        for room, counts in sorted(rooms.items())
    ]


def main() -> None:
    """Print the table, and save it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    rows = sizes(options.checkout)
    with options.save.open("w", newline="") if options.save else sys.stdout as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
