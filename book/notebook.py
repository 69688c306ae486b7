"""Pages of the book from executed notebooks.

Outputs are taken as they are stored. Hidden tests are left out; a solution is folded under
the stub that students start from; a chart gets the words that it carries as its text form, which
`labsupport.plotting` wrote for those who cannot see it; tables get headers that say what they head.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from book.results import clean_table
from labsupport.course.editions import CODE_STUB

_HIDDEN_TESTS = re.compile(
    r"^[ \t]*### BEGIN HIDDEN TESTS\n.*?^[ \t]*### END HIDDEN TESTS[ \t]*\n?",
    re.MULTILINE | re.DOTALL,
)
_SOLUTION = re.compile(
    r"^([ \t]*)### BEGIN SOLUTION\n(.*?)^[ \t]*### END SOLUTION[ \t]*$", re.MULTILINE | re.DOTALL
)
_MARKER = re.compile(r"^[ \t]*### (BEGIN|END) SOLUTION[ \t]*\n?", re.MULTILINE)
_FOLDED = """<details class="solution"><summary>Show the solution</summary>

```ipython3
{code}
```

</details>
"""


def page(notebook: dict[str, Any]) -> dict[str, Any]:
    """A notebook as the book shows it.

    Args:
        notebook: nbformat 4 as JSON, with outputs.

    Raises:
        ValueError: a picture among the outputs has no text form to describe it.
    """
    made = copy.deepcopy(notebook)
    made["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    made["cells"] = [new for cell in made["cells"] for new in _cells(cell)]
    return made


def stub(source: str) -> str:
    """A solution cell as students get it."""

    def cut(found: re.Match[str]) -> str:
        return "\n".join(found[1] + line for line in CODE_STUB.split("\n"))

    return _SOLUTION.sub(cut, source)


def _cells(cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    source = _HIDDEN_TESTS.sub("", "".join(cell["source"])).rstrip("\n")
    cell["source"] = source
    for output in cell.get("outputs", []):
        _make_readable(cell, output.get("data", {}))
    if not _SOLUTION.search(source):
        yield cell
        return
    cell["source"] = stub(source)
    yield cell
    yield {
        "cell_type": "markdown",
        "id": f"{cell['id']}-solution",
        "metadata": {},
        "source": _FOLDED.format(code=_MARKER.sub("", source).rstrip("\n")),
    }


def _make_readable(cell: dict[str, Any], data: dict[str, Any]) -> None:
    if "text/html" in data:
        data["text/html"] = clean_table("".join(data["text/html"]))
    if "image/png" in data:
        data.pop("text/html", None)
        words = " ".join("".join(data.get("text/plain", "")).split())
        if not words or words.startswith("<"):
            raise ValueError(f"the picture of cell {cell['id']} has no description in words")
        cell["metadata"].setdefault("mystnb", {})["image"] = {"alt": words}
