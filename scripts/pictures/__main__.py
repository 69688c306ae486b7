"""Draw the pictures of the README and of the theory chapters: `make pictures`.

Each module beside this one says in `FIGURES` which files it draws: a path below the project folder,
and the function that returns its matplotlib Figure. To add a picture, add an entry or a module.

    make pictures                     all of them
    make pictures ARGS=online         those whose path contains "online"
"""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent


def main(wanted: str = "") -> None:
    """Draw every figure whose path contains `wanted`."""
    for module in sorted(path.stem for path in HERE.glob("[a-z]*.py")):
        for path, draw in importlib.import_module(module).FIGURES.items():
            if wanted in path:
                (PROJECT / path).parent.mkdir(parents=True, exist_ok=True)
                draw().savefig(PROJECT / path, dpi=110)
                print(path)


if __name__ == "__main__":
    main(*sys.argv[1:2])
