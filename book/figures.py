"""A figure to play with, put into the chapter that it belongs to.

What it looks like is in figures/*.html, what it does in static/*.js. Without a script a reader is
sent to the chapter's worked example.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

HERE = Path(__file__).resolve().parent / "figures"


@dataclass(frozen=True)
class Figure:
    """A figure to play with."""

    name: str  # of its files, and the id of its heading
    docname: str  # the page that it stands on
    section: str  # the title of the section at whose end it stands


FIGURES = (Figure("softmax", "theory/02-online-softmax", "Worked example"),)


def place(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put the figures of a page at the end of their sections."""
    for figure in FIGURES:
        if figure.docname != docname:
            continue
        for section in doctree.findall(nodes.section):
            if section[0].astext() == figure.section:
                page = (HERE / f"{figure.name}.html").read_text(encoding="utf-8")
                section += nodes.raw("", page, format="html")
                break
        else:
            getLogger(__name__).warning(
                "%s has no section %r for the figure %r", docname, figure.section, figure.name
            )


def load(
    app: Sphinx, pagename: str, templatename: str, context: dict, doctree: nodes.document | None
) -> None:
    """Load a figure's script on its page only."""
    for figure in FIGURES:
        if figure.docname == pagename:
            app.add_js_file(f"{figure.name}.js", loading_method="defer")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("doctree-resolved", place)
    app.connect("html-page-context", load)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
