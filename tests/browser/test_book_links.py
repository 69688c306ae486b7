"""Links in the built book: each within it leads somewhere, and nothing is loaded from elsewhere."""

import re
import urllib.parse
from functools import cache

import pytest
from bs4 import BeautifulSoup

from labsupport.paths import notebooks_dir
from tests.browser.book_site import BOOK, CHAPTERS, NOTEBOOKS, PAGES

pytestmark = pytest.mark.browser


@cache
def soup(name):
    return BeautifulSoup((BOOK / name).read_text(encoding="utf-8"), "html.parser")


@cache
def anchors(name):
    return {tag["id"] for tag in soup(name).find_all(id=True)}


def hrefs(name):
    return [tag["href"] for tag in soup(name).find_all("a", href=True)]


def test_every_link_within_the_book_leads_to_a_page_and_an_anchor_and_others_are_encrypted():
    broken = []
    for name in PAGES:
        for href in hrefs(name):
            target = urllib.parse.urlsplit(href)
            if target.scheme:
                if not href.startswith(("https://", "http://localhost:8888/")):
                    broken.append((name, href))
                continue
            place = (BOOK / name).parent / urllib.parse.unquote(target.path)
            file = place.resolve() if target.path else BOOK.resolve() / name
            if not file.is_file():
                broken.append((name, href))
            elif target.fragment and file.suffix == ".html":
                known = anchors(str(file.relative_to(BOOK.resolve())))
                if urllib.parse.unquote(target.fragment) not in known:
                    broken.append((name, href))
    assert broken == []


def test_every_exercise_can_be_reached_from_a_chapter_or_its_notebook():
    every = {f"{name}#{anchor}" for name in NOTEBOOKS for anchor in anchors(name)}
    exercises = {place for place in every if re.search(r"#exercise-\d-\d$", place)}
    written = [*notebooks_dir().glob("*.py"), *notebooks_dir().glob("further/*.py")]
    titles = [re.findall(r"(?m)^# #+ Exercise \d-\d", path.read_text()) for path in written]
    assert len(exercises) == sum(map(len, titles)) > 0
    for name in NOTEBOOKS:
        own = {href for href in hrefs(name) if re.fullmatch(r"#exercise-\d-\d", href)}
        assert {f"{name}{href}" for href in own} == {e for e in exercises if e.startswith(name)}
    from_chapters = {href.removeprefix("../") for name in CHAPTERS for href in hrefs(name)}
    assert {place for place in exercises if "/further/" not in place} <= from_chapters


def test_a_chapter_that_the_reading_order_names_leads_to_its_sections_and_back():
    for name in CHAPTERS:
        if name.startswith("theory/10-"):
            continue  # read when needed, says the table
        (box,) = soup(name).select("nav.beside")
        links = [tag["href"] for tag in box.find_all("a")]
        assert links
        assert all(link.startswith("../notebooks/0") for link in links)
        for link in links:
            place = link.removeprefix("../").partition("#")[0]
            assert f"../{name}" in {href.partition("#")[0] for href in hrefs(place)}, place
