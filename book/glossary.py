"""Terms lead to the glossary where a page first uses them, and show their meaning there and then.

The terms are the bold beginnings of theory/glossary.md. Words that also have an everyday meaning,
or several in the lab, are left alone: a wrong explanation is worse than none (`NOT_LINKED`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from docutils import nodes
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
    "held out", '"flash"',
])  # fmt: skip
# How a term is written besides its name in the glossary.
ALSO = {
    "online softmax": ("online-softmax",),
    "materialise": ("materialises", "materialised", "materialising"),
    "gib": (),
    "gb": (),
    "mib": (),
}
_SKIPPED = (
    nodes.title, nodes.literal, nodes.literal_block, nodes.reference, nodes.math, nodes.math_block,
    nodes.raw, nodes.caption, nodes.image, nodes.comment, nodes.thead,
)  # fmt: skip


@dataclass(frozen=True)
class Term:
    """An entry of the glossary.

    Attributes:
        title: its bold beginning, such as "HBM, SRAM".
        anchor: its id on the glossary's page.
        words: what it is called in texts.
        meaning: its definition.
    """

    title: str
    anchor: str
    words: tuple[str, ...]
    meaning: tuple[nodes.Node, ...]


def terms(glossary: nodes.document) -> list[Term]:
    """The entries of the glossary's page: paragraphs that begin "**Term** · ..."."""
    return [_term(paragraph) for paragraph in _entries(glossary)]


def anchor_of(title: str) -> str:
    """The id of an entry: of the first word in its title."""
    first = re.split(r",| \(", title)[0]
    return "term-" + re.sub(r"[^a-z0-9]+", "-", first.lower()).strip("-")


def words_of(title: str) -> tuple[str, ...]:
    """What may stand in a text for an entry of that title.

    "HBM, SRAM" are two; "Grouped-query heads (MHA, MQA, GQA)" four; "RoPE (rotary positions)" two.
    """
    outside = re.sub(r"\([^)]*\)", "", title)
    inside = ",".join(found for found in re.findall(r"\(([^)]*)\)", title) if found[:3] != "of ")
    names = [name.strip() for name in f"{outside},{inside}".split(",")]
    kept = [name for name in names if name and name.lower() not in NOT_LINKED]
    return tuple(dict.fromkeys(word for name in kept for word in _forms(name)))


def mark_entries(app: Sphinx, doctree: nodes.document) -> None:
    """Give the glossary's entries their anchors."""
    if app.env.docname == GLOSSARY:
        for paragraph in _entries(doctree):
            paragraph["ids"].append(anchor_of(paragraph.next_node(nodes.strong).astext()))


def link_terms(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Link the first use of each term on a page; put the meanings of those at the page's end."""
    if not docname.startswith(PAGES) or docname in (GLOSSARY, "theory/references"):
        return
    pending = {
        word: term for term in _all_terms(app) for word in (*term.words, *_capitals(term.words))
    }
    used: list[Term] = []
    uri = app.builder.get_relative_uri(docname, GLOSSARY)
    for text in list(_prose(doctree)):
        _link_in(text, pending, used, uri)
    doctree["book-terms"] = used  # for the page's HTML: here, the search would index the meanings


def add_meanings(
    app: Sphinx, pagename: str, templatename: str, context: dict, doctree: nodes.document | None
) -> None:
    """Put the meanings of a page's linked terms behind its text, for the script to show.

    Without the script they stay hidden, and the links lead to the glossary.
    """
    used: list[Term] = doctree.get("book-terms", []) if doctree is not None else []
    if not used:
        return
    made = []
    for term in used:
        content = nodes.paragraph("", "", nodes.strong("", term.title), nodes.Text(" · "))
        content += [node.deepcopy() for node in term.meaning]
        html = app.builder.render_partial(content)["fragment"]
        made.append(f'<div class="meaning" id="meaning-{term.anchor}" role="tooltip">{html}</div>')
    context["body"] += f'<div class="meanings">{"".join(made)}</div>'


def _entries(glossary: nodes.document) -> Iterator[nodes.paragraph]:
    for paragraph in glossary.findall(nodes.paragraph):
        bold = paragraph.next_node(nodes.strong)
        if bold is not None and paragraph.astext().startswith(f"{bold.astext()} · "):
            yield paragraph


def _term(paragraph: nodes.paragraph) -> Term:
    bold = paragraph.next_node(nodes.strong)
    title = bold.astext()
    rest = [child.deepcopy() for child in paragraph.children[paragraph.index(bold) + 1 :]]
    rest[0] = nodes.Text(rest[0].astext().removeprefix(" · "))
    return Term(title, anchor_of(title), words_of(title), tuple(rest))


def _forms(name: str) -> tuple[str, ...]:
    # Inside a sentence a name begins with a small letter, unless it is an abbreviation or a name.
    small = name if re.search(r"[A-Z]", name[1:]) else name[0].lower() + name[1:]
    if small.lower() in ALSO:
        return (small, *ALSO[small.lower()]) if ALSO[small.lower()] else ()
    plural = f"{small[:-1]}ies" if re.search(r"[^aeiou]y$", small) else f"{small}s"
    return (small,) if small.endswith("s") else (small, plural)


def _capitals(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word[0].upper() + word[1:] for word in words if word[0].islower())


def _all_terms(app: Sphinx) -> list[Term]:
    if not hasattr(app, "book_terms"):
        app.book_terms = terms(app.env.get_doctree(GLOSSARY))
    return app.book_terms


def _prose(doctree: nodes.document) -> Iterator[nodes.Text]:
    def inside(node: nodes.Node) -> Iterator[nodes.Text]:
        _join_lines(node)
        for child in node.children:
            if isinstance(child, nodes.Text):
                yield child
            elif not isinstance(child, _SKIPPED) and not _is_output(child):
                yield from inside(child)

    return inside(doctree)


def _join_lines(node: nodes.Node) -> None:
    """Make one text of neighbouring ones: lines come one by one, and a term may break."""
    joined: list[nodes.Node] = []
    for child in node.children:
        if isinstance(child, nodes.Text) and joined and isinstance(joined[-1], nodes.Text):
            joined[-1] = nodes.Text(joined[-1] + child)
        else:
            joined.append(child)
    if isinstance(node, nodes.Element) and len(joined) < len(node.children):
        node.children = []
        node.extend(joined)


def _is_output(node: nodes.Node) -> bool:
    classes = node.get("classes", []) if isinstance(node, nodes.Element) else []
    return "cell_input" in classes or "cell_output" in classes


def _link_in(text: nodes.Text, pending: dict[str, Term], used: list[Term], uri: str) -> None:
    """Replace the first uses in one text node."""
    if not pending:
        return
    longest_first = sorted(pending, key=len, reverse=True)
    either = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in longest_first)
    pattern = re.compile(rf"(?<![\w-])({either})(?![\w-])")
    content, done, parts = text.astext(), 0, []
    while found := pattern.search(content, done):
        term = pending.get(" ".join(found[1].split()))
        if term is None:  # used a moment ago, in this very text
            parts.append(nodes.Text(content[done : found.end()]))
            done = found.end()
            continue
        for word in [word for word, its in pending.items() if its is term]:
            del pending[word]
        used.append(term)
        link = nodes.reference(
            "", found[1], internal=True, refuri=f"{uri}#{term.anchor}", classes=["term"]
        )
        parts += [nodes.Text(content[done : found.start()]), link]
        done = found.end()
    if done:
        parts.append(nodes.Text(content[done:]))
        text.parent.replace(text, parts)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("doctree-read", mark_entries)
    # Before the boxes of crosslinks come: what stands in them is no use of a term.
    app.connect("doctree-resolved", link_terms, priority=400)
    app.connect("html-page-context", add_meanings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
