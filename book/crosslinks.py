"""Boxes that lead from a chapter to its sections and exercises, and back; the way into JupyterLab.

Which belongs to which is what the table "Reading order" of theory/README.md says. Sections and
exercises of notebooks are known by the numbers in their headings, and get lasting anchors from
them: `#section-1-4`, `#exercise-1-3`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

from book.gather import PROJECT
from book.reading_order import Reading, readings

_NUMBERED = re.compile(r"^(?:(\d+)\.(\d+)|(Exercise) (\d+)-(\d+)) · (.*)$")
OPEN = """<div class="open-notebook"><p><strong>Work in it.</strong> This page shows the notebook
as it was run. Your own copy runs in JupyterLab: type <code>make lab</code> in the lab's folder,
then <a href="http://localhost:8888/lab/tree/{file}">open {file} in JupyterLab</a> (at its usual
address; the terminal prints yours). There the exercises wait for your code; here the solutions are
folded away.</p></div>"""


@dataclass(frozen=True)
class Place:
    """A numbered section or exercise of a notebook.

    Attributes:
        docname: its page.
        kind: "section" or "exercise".
        section: number of the section that it is, or lies in; 0 before the first.
        label: such as "1.4" or "1-3".
        title: its heading without the number.
    """

    docname: str
    kind: str
    section: int
    label: str
    title: str

    @property
    def anchor(self) -> str:
        """The id of the heading's section."""
        return f"{self.kind}-{self.label.replace('.', '-')}"


def anchor_headings(app: Sphinx, doctree: nodes.document) -> None:
    """Give numbered headings of notebooks their lasting anchors."""
    if app.env.docname.startswith("notebooks/"):
        for section, place in _numbered(app.env.docname, doctree):
            section["ids"].append(place.anchor)
            app.env.book_places = getattr(app.env, "book_places", {})
            app.env.book_places.setdefault(app.env.docname, []).append(place)


def forget(app: Sphinx, env: object, docname: str) -> None:
    """A page is read anew, or gone: forget its headings."""
    getattr(env, "book_places", {}).pop(docname, None)


def add_boxes(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put the boxes into chapters and notebooks."""
    table = (PROJECT / "theory" / "README.md").read_text(encoding="utf-8")
    number = re.match(r"(theory|notebooks)/0*(\d+)-", docname)
    if number is None or not hasattr(app.env, "book_places"):
        return
    top = next(doctree.findall(nodes.section))
    if number[1] == "theory":
        found = [r for r in readings(table) if r.chapter == int(number[2])]
        if found:
            _into_first_section(top, _chapter_box(app, docname, found))
        return
    found = [r for r in readings(table) if r.notebook == int(number[2])]
    box = [
        _raw(OPEN.format(file=f"{Path(docname).name}.ipynb")),
        *_notebook_box(app, docname, found),
    ]
    top[1:1] = box
    _section_lines(app, doctree, docname, found)


def _numbered(docname: str, doctree: nodes.document) -> list[tuple[nodes.section, Place]]:
    found, current = [], 0
    for section in doctree.findall(nodes.section):
        match = _NUMBERED.match(section[0].astext())
        if match is None:
            continue
        if match[3]:
            place = Place(docname, "exercise", current, f"{match[4]}-{match[5]}", match[6])
        else:
            current = int(match[2])
            place = Place(docname, "section", current, f"{match[1]}.{match[2]}", match[6])
        found.append((section, place))
    return found


def _notebook_of(app: Sphinx, number: int) -> str:
    return next(d for d in sorted(app.env.found_docs) if d.startswith(f"notebooks/{number:02}-"))


def _chapter_of(app: Sphinx, number: int) -> str:
    return next(d for d in sorted(app.env.found_docs) if d.startswith(f"theory/{number:02}-"))


def _chapter_box(app: Sphinx, docname: str, found: list[Reading]) -> list[nodes.Node]:
    items = []
    for reading in found:
        notebook = _notebook_of(app, reading.notebook)
        places = app.env.book_places[notebook]
        if not reading.sections:
            exercises = [p for p in places if p.kind == "exercise"]
            title = app.env.titles[notebook].astext().partition(" · ")[2]
            items.append(
                _item(
                    _link(app, docname, notebook, "", f"Notebook {reading.notebook}"),
                    nodes.Text(f" · {title}"),
                    *_exercises(app, docname, exercises),
                )
            )
        for number in reading.sections:
            here = [p for p in places if p.section == number]
            section = next(p for p in here if p.kind == "section")
            items.append(
                _item(
                    _link(app, docname, notebook, section.anchor, f"Section {section.label}"),
                    nodes.Text(f" · {section.title}"),
                    *_exercises(app, docname, [p for p in here if p.kind == "exercise"]),
                )
            )
    return _box("In the notebooks", "beside", items)


def _notebook_box(app: Sphinx, docname: str, found: list[Reading]) -> list[nodes.Node]:
    chapters: dict[int, list[Reading]] = {}
    for reading in found:
        chapters.setdefault(reading.chapter, []).append(reading)
    items = []
    places = {p.section: p for p in app.env.book_places[docname] if p.kind == "section"}
    for chapter, its in sorted(chapters.items()):
        parts = [_chapter_link(app, docname, chapter)]
        sections = [(number, r.remark) for r in its for number in r.sections]
        for i, (number, _) in enumerate(sections):
            parts.append(nodes.Text(", section " if i == 0 else ", "))
            parts.append(_link(app, docname, docname, places[number].anchor, places[number].label))
        items.append(_item(*parts))
    boxes = _box("The theory beside it", "beside", items)
    exercises = [p for p in app.env.book_places[docname] if p.kind == "exercise"]
    lines = [
        _item(
            _link(app, docname, docname, p.anchor, f"Exercise {p.label}"),
            nodes.Text(f" · {p.title}"),
        )
        for p in exercises
    ]
    boxes += _box("Its exercises", "beside exercises", lines)
    return [_raw('<div class="besides">'), *boxes, _raw("</div>")]


def _section_lines(
    app: Sphinx, doctree: nodes.document, docname: str, found: list[Reading]
) -> None:
    """One line under a section's heading: the chapter that derives it."""
    for section, place in _numbered(docname, doctree):
        if place.kind != "section":
            continue
        for reading in [r for r in found if place.section in r.sections]:
            remark = f" ({reading.remark})" if reading.remark else ""
            line = nodes.paragraph("", "", classes=["derived-in", "no-search"])
            line += [nodes.Text("Theory: "), _chapter_link(app, docname, reading.chapter)]
            line += nodes.Text(remark)
            section.insert(1, line)


def _chapter_link(app: Sphinx, docname: str, number: int) -> nodes.reference:
    chapter = _chapter_of(app, number)
    title = app.env.titles[chapter].astext().partition(" · ")[2]
    return _link(app, docname, chapter, "", f"chapter {number}, {title}")


def _exercises(app: Sphinx, docname: str, places: list[Place]) -> list[nodes.Node]:
    made: list[nodes.Node] = []
    for i, place in enumerate(places):
        made.append(nodes.Text(", with " if i == 0 else ", "))
        words = f"exercise {place.label}" if i == 0 else place.label
        made.append(_link(app, docname, place.docname, place.anchor, words))
    return made


def _link(app: Sphinx, source: str, target: str, anchor: str, words: str) -> nodes.reference:
    uri = "" if source == target else app.builder.get_relative_uri(source, target)
    place = f"{uri}#{anchor}" if anchor else uri
    return nodes.reference("", words, internal=True, refuri=place)


def _item(*parts: nodes.Node) -> nodes.list_item:
    return nodes.list_item("", nodes.paragraph("", "", *parts))


def _box(title: str, classes: str, items: list[nodes.list_item]) -> list[nodes.Node]:
    heading = f'<nav class="{classes}" aria-label="{title}"><p class="beside-title">{title}</p>'
    # no-search: else a word is found wherever a chapter's title stands.
    return [_raw(heading), nodes.bullet_list("", *items, classes=["no-search"]), _raw("</nav>")]


def _into_first_section(top: nodes.section, box: list[nodes.Node]) -> None:
    """Behind what the chapter answers: that is what a reader wants to know first."""
    first = next((child for child in top.children if isinstance(child, nodes.section)), top)
    first.extend(box)


def _raw(html: str) -> nodes.raw:
    return nodes.raw("", html, format="html")


def setup(app: Sphinx) -> dict[str, object]:
    """Connect to Sphinx."""
    app.connect("doctree-read", anchor_headings)
    app.connect("env-purge-doc", forget)
    app.connect("doctree-resolved", add_boxes)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
