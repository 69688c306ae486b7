"""Terms lead to the glossary where a page first uses them, and show their meaning there and then.

The terms are the bold beginnings of theory/glossary.md. Words that also have an everyday meaning,
or several in the lab, are left alone: a wrong explanation is worse than none (`NOT_LINKED`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

GLOSSARY = "theory/glossary"
PAGES = ("theory/", "notebooks/")
# Under these names people mean too many other things, in these very texts.
NOT_LINKED = frozenset([
    "accumulator", "batch", "block", "bucket", "calibration", "causal", "ceiling", "clipping",
    "deterministic", "driver", "efficiency", "exponent", "exposed", "fusion", "head_dim",
    "heads", "hidden", "hop", "interpolation", "kernel", "latency", "layout", "left", "masked",
    "measured", "messages", "packed", "packing", "program", "rank", "scores", "seqlen", "shard",
    "specified", "static", "throughput", "tile", "toolkit", "wave", "weights", "window", "world",
    "held out", '"flash"', "gib", "gb", "mib",
])  # fmt: skip
# How a term is written besides its name in the glossary and its plural.
ALSO = {
    "online softmax": ("online-softmax",),
    "materialise": ("materialises", "materialised", "materialising"),
}
_SKIPPED = (
    nodes.title, nodes.literal, nodes.literal_block, nodes.reference, nodes.math, nodes.math_block,
    nodes.raw, nodes.caption, nodes.image, nodes.comment, nodes.thead,
)  # fmt: skip


@dataclass(frozen=True)
class Term:
    """An entry of the glossary: a paragraph that begins "**Term** · ...".

    Attributes:
        title: its bold beginning, such as "HBM, SRAM".
        paragraph: all of it.
    """

    title: str
    paragraph: nodes.paragraph

    @property
    def anchor(self) -> str:
        """The id of the entry: of the first word in its title."""
        first = re.split(r",| \(", self.title)[0]
        return "term-" + re.sub(r"[^a-z0-9]+", "-", first.lower()).strip("-")

    def words(self) -> Iterator[str]:
        """The words that may stand in a text for the entry.

        "HBM, SRAM" are two; "Grouped-query heads (MHA, MQA, GQA)" four; "RoPE (rotary positions)"
        two. Inside a sentence a name begins with a small letter, unless it is an abbreviation.
        """
        inside = [found for found in re.findall(r"\(([^)]*)\)", self.title) if found[:3] != "of "]
        names = ",".join([re.sub(r"\([^)]*\)", "", self.title), *inside]).split(",")
        for name in filter(None, map(str.strip, names)):
            if name.lower() in NOT_LINKED:
                continue
            small = name if re.search(r"[A-Z]", name[1:]) else name[0].lower() + name[1:]
            plural = f"{small[:-1]}ies" if re.search(r"[^aeiou]y$", small) else f"{small}s"
            more = ALSO.get(small.lower(), () if small.endswith("s") else (plural,))
            for word in (small, *more):
                yield from {word: 0, word[0].upper() + word[1:]: 0}


def entries(glossary: nodes.document) -> Iterator[Term]:
    """The entries of the glossary's page."""
    for paragraph in glossary.findall(nodes.paragraph):
        bold = paragraph.next_node(nodes.strong)
        if bold is not None and paragraph.astext().startswith(f"{bold.astext()} · "):
            yield Term(bold.astext(), paragraph)


def mark_entries(app: Sphinx, doctree: nodes.document) -> None:
    """Give the glossary's entries their anchors."""
    if app.env.docname == GLOSSARY:
        for term in entries(doctree):
            term.paragraph["ids"].append(term.anchor)


def link_terms(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Link the first use of each term on a page; note those terms for `add_meanings`."""
    if not docname.startswith(PAGES) or docname in (GLOSSARY, "theory/references"):
        return
    if not hasattr(app, "book_terms"):
        terms = entries(app.env.get_doctree(GLOSSARY))
        app.book_terms = {word: term for term in terms for word in term.words()}
    longest_first: list[str] = sorted(app.book_terms, key=len, reverse=True)
    either = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in longest_first)
    pattern = re.compile(rf"(?<![\w-])({either})(?![\w-])")
    uri = app.builder.get_relative_uri(docname, GLOSSARY)
    used: dict[str, Term] = {}
    for text in list(_prose(doctree)):
        content, done, parts = text.astext(), 0, []
        for found in pattern.finditer(content):
            term = app.book_terms[" ".join(found[1].split())]
            if term.title in used:
                continue
            used[term.title] = term
            place, options = f"{uri}#{term.anchor}", {"internal": True, "classes": ["term"]}
            link = nodes.reference("", found[1], refuri=place, **options)
            parts += [nodes.Text(content[done : found.start()]), link]
            done = found.end()
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(content[done:])])
    doctree["book-terms"] = list(used.values())


def add_meanings(
    app: Sphinx, pagename: str, templatename: str, context: dict, doctree: nodes.document | None
) -> None:
    """Append the meanings of a page's linked terms to its text, for the script to show.

    Without the script they stay hidden, and the links lead to the glossary. (They are added to the
    page's HTML: in the document, the search would index them.)
    """
    made = []
    for term in doctree.get("book-terms", []) if doctree is not None else []:
        content = term.paragraph.deepcopy()
        content["ids"] = []
        for link in list(content.findall(addnodes.pending_xref)):
            link.replace_self(link.children)
        html = app.builder.render_partial(content)["fragment"]
        made.append(f'<div class="meaning" id="meaning-{term.anchor}" role="tooltip">{html}</div>')
    if made:
        context["body"] += f'<div class="meanings">{"".join(made)}</div>'


def _prose(node: nodes.Node) -> Iterator[nodes.Text]:
    """The texts of a page that are prose, with neighbours joined: a term may break over lines."""
    joined: list[nodes.Node] = []
    for child in node.children:
        if isinstance(child, nodes.Text) and joined and isinstance(joined[-1], nodes.Text):
            joined[-1] = nodes.Text(joined[-1] + child)
        else:
            joined.append(child)
    if len(joined) < len(node.children):
        node.children = []
        node.extend(joined)
    for child in node.children:
        classes = child.get("classes", []) if isinstance(child, nodes.Element) else []
        if isinstance(child, nodes.Text):
            yield child
        elif not isinstance(child, _SKIPPED) and not {"cell_input", "cell_output"} & set(classes):
            yield from _prose(child)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("doctree-read", mark_entries)
    # Before the boxes of crosslinks come: what stands in them is no use of a term.
    app.connect("doctree-resolved", link_terms, priority=400)
    app.connect("html-page-context", add_meanings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
