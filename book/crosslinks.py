"""Boxes that lead from a chapter to its sections and exercises, and back; the way into JupyterLab.

Which belongs to which is what the table "Reading order" of theory/README.md says. Sections and
exercises of notebooks are known by the numbers in their headings, and get lasting anchors from
them: `#section-1-4`, `#exercise-1-3`. Code that is a public name leads to the reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from book.gather import PROJECT
from book.reading_order import Reading, readings
from book.reference import ROOMS, public_names

_NUMBERED = re.compile(r"^(?:(\d+)\.(\d+)|(Exercise) (\d+)-(\d+)) · (.*)$")
_LINES = re.compile(r"<dl>\s*(<dd><em class=\"sig-param\">.*?</dd>)\s*</dl>", re.DOTALL)
OPEN = """<div class="open-notebook"><p><strong>Work in it.</strong> This page shows the notebook
as it was run. Your own copy runs in JupyterLab: type <code>make lab</code> in the lab's folder,
then <a href="http://localhost:8888/lab/tree/{file}">open {file} in JupyterLab</a> (at its usual
address; the terminal prints yours). There the exercises wait for your code; here the solutions are
folded away.</p></div>"""


@dataclass(frozen=True)
class Place:
    """A numbered section or exercise of a notebook."""

    docname: str  # its page
    kind: str  # "section" or "exercise"
    section: int  # number of the section that it is, or lies in; 0 before the first
    label: str  # such as "1.4" or "1-3"
    title: str  # its heading without the number

    @property
    def anchor(self) -> str:
        """The id of the heading's section."""
        return f"{self.kind}-{self.label.replace('.', '-')}"

    def link(self, builder: Any, source: str, words: str) -> str:
        """A link to the heading, as HTML of the page `source`."""
        uri = "" if source == self.docname else builder.get_relative_uri(source, self.docname)
        return f'<a class="reference internal" href="{uri}#{self.anchor}">{words}</a>'


def anchor_headings(app: Sphinx, doctree: nodes.document) -> None:
    """Give numbered headings of notebooks their lasting anchors."""
    if app.env.docname.startswith("notebooks/"):
        for section, place in _numbered(app.env.docname, doctree):
            section["ids"].append(place.anchor)
            app.env.book_places.setdefault(app.env.docname, []).append(place)


def add_boxes(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put the boxes into chapters and notebooks."""
    table = (PROJECT / "theory" / "README.md").read_text(encoding="utf-8")
    number = re.match(r"(theory|notebooks)/(?:0*(\d+)-|further/)", docname)
    if number is None:
        return
    top = next(doctree.findall(nodes.section))
    if number[1] == "theory":
        found = [r for r in readings(table) if r.chapter == int(number[2])]
        # Behind what the chapter answers: that is what a reader wants to know first.
        first = next((child for child in top.children if isinstance(child, nodes.section)), top)
        first += [_raw(_chapter_box(app, docname, found))] if found else []
        return
    found = [r for r in readings(table) if r.notebook == int(number[2] or 0)]
    name = f"{docname.removeprefix('notebooks/')}.ipynb"
    top[1:1] = [_raw(OPEN.format(file=name) + _notebook_boxes(app, docname, found))]
    for section, place in _numbered(docname, doctree):
        for reading in found if place.kind == "section" else ():
            if place.section in reading.sections:  # a line: the chapter that derives it
                words = f"Theory: {_chapter_link(app, docname, reading.chapter)}"
                words += f" ({escape(reading.remark)})" if reading.remark else ""
                section.insert(1, _raw(f'<p class="derived-in">{words}</p>'))


def _numbered(docname: str, doctree: nodes.document) -> Iterator[tuple[nodes.section, Place]]:
    current = 0
    for section in doctree.findall(nodes.section):
        match = _NUMBERED.match(section[0].astext())
        if match is None:
            continue
        if match[3]:
            place = Place(docname, "exercise", current, f"{match[4]}-{match[5]}", match[6])
        else:
            current = int(match[2])
            place = Place(docname, "section", current, f"{match[1]}.{match[2]}", match[6])
        yield section, place


def _page(app: Sphinx, docname: str, folder: str, number: int) -> tuple[str, str, str]:
    """Name, relative address and title of a chapter or notebook."""
    page = next(p for p in sorted(app.env.found_docs) if p.startswith(f"{folder}/{number:02}-"))
    title = escape(app.env.titles[page].astext().partition(" · ")[2])
    return page, app.builder.get_relative_uri(docname, page), title


def _chapter_link(app: Sphinx, docname: str, number: int) -> str:
    _, uri, title = _page(app, docname, "theory", number)
    return f'<a class="reference internal" href="{uri}">chapter {number}, {title}</a>'


def _chapter_box(app: Sphinx, docname: str, found: list[Reading]) -> str:
    items = []
    for reading in found:
        page, uri, title = _page(app, docname, "notebooks", reading.notebook)
        places = app.env.book_places[page]
        if not reading.sections:
            link = f'<a class="reference internal" href="{uri}">Notebook {reading.notebook}</a>'
            items.append(f"{link} · {title}{_exercises(app, docname, places)}")
        for number in reading.sections:
            here = [p for p in places if p.section == number]
            section = next(p for p in here if p.kind == "section")
            link = section.link(app.builder, docname, f"Section {section.label}")
            items.append(f"{link} · {escape(section.title)}{_exercises(app, docname, here)}")
    return _box("In the notebooks", "beside", items)


def _notebook_boxes(app: Sphinx, docname: str, found: list[Reading]) -> str:
    places = app.env.book_places[docname]
    sections = {p.section: p for p in places if p.kind == "section"}
    items = []
    for chapter in sorted({reading.chapter for reading in found}):
        numbers = [n for r in found if r.chapter == chapter for n in r.sections]
        links = [sections[n].link(app.builder, docname, sections[n].label) for n in numbers]
        listing = f", section {', '.join(links)}" if links else ""
        items.append(_chapter_link(app, docname, chapter) + listing)
    exercises = [
        f"{p.link(app.builder, docname, f'Exercise {p.label}')} · {escape(p.title)}"
        for p in places
        if p.kind == "exercise"
    ]
    boxes = _box("The theory beside it", "beside", items) if items else ""
    boxes += _box("Its exercises", "beside exercises", exercises)
    return f'<div class="besides">{boxes}</div>'


def _exercises(app: Sphinx, docname: str, places: list[Place]) -> str:
    exercises = [p for p in places if p.kind == "exercise"]
    words = [f"exercise {p.label}" if p is exercises[0] else p.label for p in exercises]
    pairs = zip(exercises, words, strict=True)
    links = ", ".join(p.link(app.builder, docname, text) for p, text in pairs)
    return f", with {links}" if links else ""


def _box(title: str, classes: str, items: list[str]) -> str:
    listing = "".join(f"<li><p>{item}</p></li>" for item in items)
    return (
        f'<nav class="{classes}" aria-label="{title}"><p class="beside-title">{title}</p>'
        f'<ul class="simple">{listing}</ul></nav>'
    )


def _raw(html: str) -> nodes.raw:
    # no-search: else a word is found wherever a chapter's title stands.
    return nodes.raw("", html, format="html", classes=["no-search"])


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Link code that is a public name to its entry: `labsupport.ROOM.name`, or unmistakable names.

    Names that are plain words, such as `train`, stay as they are unless they are written in full.
    """
    entries = {
        spelled: f"{app.builder.get_relative_uri(docname, f'reference/{room}')}#{full}"
        for room in ROOMS
        for name in public_names(room)
        for full in [f"labsupport.{room}.{name}"]
        for spelled in [full, *[name] * bool(re.search("_|[a-z][A-Z]", name))]
    }
    if docname.startswith("reference/"):
        return
    for code in list(doctree.findall(nodes.literal)):
        target = entries.get(re.sub(r"\(.*\)$", "", code.astext()))
        if target and not isinstance(code.parent, nodes.reference | nodes.title):
            link = nodes.reference("", "", refuri=target, internal=True)
            code.replace_self(link)
            link += code


def divide_signatures(
    app: Sphinx, pagename: str, templatename: str, context: dict, doctree: nodes.document | None
) -> None:
    """Turn the parameter list of a long signature, which has no terms, into divisions."""
    if pagename.startswith("reference/"):
        context["body"] = _LINES.sub(
            lambda found: (
                '<div class="parameters">'
                + found[1].replace("<dd>", "<div>").replace("</dd>", "</div>")
                + "</div>"
            ),
            context["body"],
        )


def setup(app: Sphinx) -> dict[str, object]:
    """Connect to Sphinx."""
    app.connect("builder-inited", lambda app: setattr(app.env, "book_places", {}))
    app.connect("doctree-read", anchor_headings)
    app.connect("doctree-resolved", add_boxes)
    app.connect("doctree-resolved", link_names)
    app.connect("html-page-context", divide_signatures)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
