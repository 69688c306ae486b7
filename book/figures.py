"""Two figures to play with, put into the chapters that they belong to.

What they look like is in figures/*.html, what they do in static/*.js. Without a script a reader
sees a table made here by the lab's own code, or is sent to the chapter's worked example.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

HERE = Path(__file__).resolve().parent / "figures"
SEQLEN, HEAD_DIM, FAST_KIB = 4096, 64, 99


@dataclass(frozen=True)
class Figure:
    """A figure to play with."""

    name: str  # of its files, and the id of its heading
    docname: str  # the page that it stands on
    section: str  # the title of the section at whose end it stands


FIGURES = (
    Figure("softmax", "theory/02-online-softmax", "Worked example"),
    Figure("tiles", "theory/04-io-complexity", "How much is gained, and where it ends"),
)


def place(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put the figures of a page at the end of their sections."""
    for figure in FIGURES:
        if figure.docname != docname:
            continue
        for section in doctree.findall(nodes.section):
            if section[0].astext() == figure.section:
                section += nodes.raw("", html(figure.name), format="html")
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


def html(name: str) -> str:
    """A figure's HTML, with the numbers that it shows at first."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    values = tile_values() if name == "tiles" else {}
    return environment.get_template(f"{name}.html").render(**values)


def tile_values() -> dict[str, Any]:
    """The fast memories to choose from, and the pairs that stand there without a script."""
    from labsupport.analysis.tiles import fast_memories, tile_choices
    from labsupport.profiling.units import format_bytes

    table = tile_choices(SEQLEN, HEAD_DIM, fast_bytes=FAST_KIB * 1024)
    square = table[(table["block_q"] == table["block_k"])]
    return {
        "memories": [
            {"label": label, "bytes": size, "chosen": size == FAST_KIB * 1024}
            for label, size in fast_memories()
        ],
        "rows": [
            {
                "block": int(row["block_q"]),
                "needed": f"{row['needed_bytes'] / 1024:,.0f} KiB",
                "fits": "yes" if row["fits"] else "no",
                "moved": format_bytes(row["traffic_bytes"]),
            }
            for row in square.to_dict("records")
        ],
        "textbook": format_bytes(table.attrs["case"]["textbook_bytes"]),
        "seqlen": f"{SEQLEN:,}",
        "head_dim": HEAD_DIM,
        "fast_kib": FAST_KIB,
    }


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("doctree-resolved", place)
    app.connect("html-page-context", load)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
