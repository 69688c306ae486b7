"""Links within the project lead somewhere; `make links` follows those that leave it."""

import urllib.parse
from pathlib import Path

from scripts import texts

# The book's own pages link to what Sphinx puts beside them: `make book` stops at what is missing.
# The edition's page links to what `release` writes beside it; tests/grader/test_edition.py.
ELSEWHERE = ("book", "grader")
PAGES = [path for path in texts.pages() if path.relative_to(texts.ROOT).parts[0] not in ELSEWHERE]


def broken(path: Path) -> list[str]:
    """A message for each link of a page, within the project, that leads nowhere."""
    out = []
    for link in texts.links(path):
        if link.external:
            continue
        file, _, anchor = urllib.parse.unquote(link.target).partition("#")
        place = (path.parent / file).resolve() if file else path
        said = f"{path.name}:{link.line}: {link.target}:"
        if not place.exists():
            out.append(f"{said} there is no {place}")
        elif anchor and place.suffix in (".md", ".ipynb", ".py"):
            known = texts.anchors(place)
            if anchor not in known:
                out.append(f"{said} no such heading; there are {', '.join(sorted(known))}")
    return out


def test_links_within_the_project_lead_somewhere_and_others_go_over_https():
    assert [message for path in PAGES for message in broken(path)] == []
    outside = [link.target for path in PAGES for link in texts.links(path) if link.external]
    assert [x for x in outside if not x.startswith(("https://", "mailto:"))] == []
