"""The second part of a chapter, folded away: everything below its heading "Further"."""

from __future__ import annotations

from html import escape

from docutils import nodes
from sphinx.application import Sphinx


def fold(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Fold the part "Further" of a chapter; the line that unfolds it lists its sections."""
    for part in doctree.findall(nodes.section) if docname.startswith("theory/") else ():
        if part[0].astext() == "Further":
            titles = [child[0].astext() for child in part if isinstance(child, nodes.section)]
            line = escape(" · ".join(titles))
            opened = f'<details class="further"><summary>{line}</summary>'
            part.insert(1, nodes.raw("", opened, format="html"))
            part += nodes.raw("", "</details>", format="html")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("doctree-resolved", fold, priority=900)  # after all that adds to the sections
    return {"parallel_read_safe": True, "parallel_write_safe": True}
