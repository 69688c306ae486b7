"""Tables of Markdown pages that can be read without seeing them: headers say what they head."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

_EMPTY_HEADER = re.compile(r'<th class="head([^"]*)">\s*(<p>\s*</p>)?\s*</th>')


def drop_empty_heads(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Markdown has no table without a header: where all of its cells are empty, there is none."""
    for head in list(doctree.findall(nodes.thead)):
        if not head.astext().strip():
            head.parent.remove(head)


def mark_heads(
    app: Sphinx, pagename: str, templatename: str, context: dict, doctree: nodes.document | None
) -> None:
    """Say in a page's HTML that the headers of Markdown tables head columns."""
    if "body" in context:
        body = _EMPTY_HEADER.sub(r'<td class="head\1"></td>', context["body"])
        context["body"] = body.replace('<th class="head', '<th scope="col" class="head')


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("doctree-resolved", drop_empty_heads)
    app.connect("html-page-context", mark_heads)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
