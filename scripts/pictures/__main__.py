"""Draw the pictures of the README and of the theory chapters: `make pictures`.

Each module beside this one draws the figures of a chapter; `_draw.picture` registers each of its
functions with the file that it draws. To add a picture, add a function.

    make pictures                     all of them
    make pictures ARGS=online         those whose path contains "online"
"""

import importlib
import sys
from pathlib import Path

from _draw import FIGURES

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent


def main(wanted: str = "") -> None:
    """Draw every figure whose path contains `wanted`."""
    for module in sorted(path.stem for path in HERE.glob("[a-z]*.py")):
        importlib.import_module(module)
    for path, draw in FIGURES.items():
        if wanted in path:
            (PROJECT / path).parent.mkdir(parents=True, exist_ok=True)
            draw().savefig(PROJECT / path, dpi=110)
            print(path)


if __name__ == "__main__":
    main(*sys.argv[1:2])
