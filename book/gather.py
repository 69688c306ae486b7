"""Gather what the book is made of into one folder, in which all links still lead where they led.

A page keeps its path (`theory/…`, `notebooks/…`), so that a link from one to another needs no
change. A file of the project that a page links to, and that is no page itself, comes along under
its own path: Sphinx offers it as a download.
"""

from __future__ import annotations

import json
import re
import shutil
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from book.notebook import page
from labsupport.paths import notebooks_in

PROJECT = Path(__file__).resolve().parent.parent
PAGES = Path(__file__).resolve().parent / "pages"
COMING_FROM = "docs/coming-from.md"
PICTURE = "docs/memory-h200.png"
CHAPTERS = """
```{toctree}
:hidden:
:glob:

[0-9]*
```
"""
_FENCE = re.compile(r"^(```+).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def gather(target: Path, project: Path = PROJECT) -> None:
    """Write the book's sources into a folder, which holds nothing else afterwards."""
    sources = dict(_pages(project))
    for place, content in list(sources.items()):
        if place.suffix in (".md", ".ipynb"):
            _take_along(place, content, sources, project)
    shutil.rmtree(target, ignore_errors=True)
    for place, content in sources.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        (target / place).write_bytes(content)


def linked(text: str) -> Iterator[str]:
    """The files that a Markdown text links to or shows: paths as written, without anchors."""
    for target in _LINK.findall(_FENCE.sub("", text)):
        path = urllib.parse.unquote(target).partition("#")[0]
        if path and not re.match(r"[a-z]+:", path):
            yield path


def _pages(project: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted((project / "theory").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(project), (text + CHAPTERS * (path.name == "README.md")).encode()
    for path in notebooks_in(project / "notebooks"):
        made = page(json.loads(path.read_text(encoding="utf-8")))
        yield path.relative_to(project), json.dumps(made, indent=1).encode()
    for path in sorted((project / "docs").glob("*.md")):
        yield path.relative_to(project), path.read_bytes()
    for path in sorted(PAGES.rglob("*.md")):
        yield path.relative_to(PAGES), path.read_bytes()
    for name in (COMING_FROM, PICTURE):
        yield Path(name), (project / name).read_bytes()


def _take_along(place: Path, content: bytes, sources: dict[Path, bytes], project: Path) -> None:
    """Add the files that a page links to."""
    text = content.decode()
    if place.suffix == ".ipynb":
        cells = json.loads(content)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    for path in linked(text):
        file = (project / place.parent / path).resolve()
        if not file.is_file() or not file.is_relative_to(project):
            continue  # Sphinx says so, if it is not among the pages either
        found = file.relative_to(project)
        if found in sources:
            continue
        sources[found] = file.read_bytes()
        if found.suffix == ".md":  # a page then, but in no table of contents
            sources[found] = b"---\norphan: true\n---\n" + sources[found]
            _take_along(found, sources[found], sources, project)
