"""Links in the built book: each within it leads somewhere, and nothing is loaded from elsewhere."""

import re
import urllib.parse
from functools import cache

import pytest
from bs4 import BeautifulSoup

from tests.browser.book_site import BOOK, PAGES

pytestmark = pytest.mark.browser


@cache
def soup(name):
    return BeautifulSoup((BOOK / name).read_text(encoding="utf-8"), "html.parser")


@cache
def anchors(name):
    return {tag["id"] for tag in soup(name).find_all(id=True)}


def hrefs(name):
    return [tag["href"] for tag in soup(name).find_all("a", href=True)]


@pytest.mark.parametrize("name", PAGES)
def test_every_link_within_the_book_leads_to_a_page_and_an_anchor(name):
    broken = []
    for href in hrefs(name):
        target = urllib.parse.urlsplit(href)
        if target.scheme or href == "#":
            continue
        file = (
            (BOOK / name).parent / urllib.parse.unquote(target.path) if target.path else BOOK / name
        )
        if not file.resolve().is_file():
            broken.append(href)
        elif target.fragment and file.suffix == ".html":
            place = str(file.resolve().relative_to(BOOK.resolve()))
            if urllib.parse.unquote(target.fragment) not in anchors(place):
                broken.append(href)
    assert broken == []


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_loads_lies_in_the_book(name):
    loaded = [tag["src"] for tag in soup(name).find_all(["script", "img", "iframe"], src=True)]
    loaded += [tag["href"] for tag in soup(name).find_all("link", href=True)]
    for address in loaded:
        path = urllib.parse.urlsplit(address).path
        assert not re.match(r"(?!data:)[a-z]+:|//", address), address
        if path and not address.startswith("data:"):
            found = ((BOOK / name).parent / urllib.parse.unquote(path)).resolve()
            # Sphinx names its index of pages "genindex" and so on only if there is one.
            assert found.is_file(), address


@pytest.mark.parametrize("name", PAGES)
def test_links_to_the_outside_are_encrypted(name):
    outside = [href for href in hrefs(name) if urllib.parse.urlsplit(href).scheme]
    odd = [href for href in outside if not href.startswith(("https://", "http://localhost:8888/"))]
    assert odd == []


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("HBM, SRAM", ("HBM", "HBMs", "SRAM", "SRAMs")),
        ("Amdahl's law", ("amdahl's law",)),
        ("SM (streaming multiprocessor)", ("SM", "SMs")),
        ("Efficiency (of several devices)", ()),
        ("Batch", ()),
    ],
)
def test_a_term_is_known_by_its_names_and_their_plurals(title, words):
    from book.glossary import Term

    found = tuple(Term(title, None).words())
    assert set(words) <= set(found)
    assert bool(found) == bool(words)


def test_terms_lead_to_their_own_entries():
    for name, word, anchor in (
        ("theory/01-memory-bottleneck.html", "FlashAttention", "term-flashattention"),
        ("theory/02-online-softmax.html", "log-sum-exp", "term-log-sum-exp"),
        ("theory/09-inference.html", "KV cache", "term-kv-cache"),
        ("notebooks/01-Setup_and_Comparison.html", "SDPA", "term-sdpa"),
    ):
        links = {link.get_text(): link["href"] for link in soup(name).select("a.term")}
        assert links[word].endswith(f"glossary.html#{anchor}")
        assert soup(name).find(id=f"meaning-{anchor}").get_text(strip=True)


def test_every_exercise_can_be_reached_from_a_chapter_or_its_notebook():
    exercises = {
        f"{name}#{anchor}"
        for name in PAGES
        for anchor in anchors(name)
        if re.fullmatch(r"exercise-\d-\d", anchor)
    }
    assert len(exercises) == 21
    for name in [page for page in PAGES if re.match(r"notebooks/\d", page)]:
        own = {href for href in hrefs(name) if re.fullmatch(r"#exercise-\d-\d", href)}
        assert {f"{name}{href}" for href in own} == {e for e in exercises if e.startswith(name)}
    from_chapters = {
        href.removeprefix("../")
        for name in PAGES
        if name.startswith("theory/")
        for href in hrefs(name)
    }
    assert len(exercises & from_chapters) >= 18


@pytest.mark.parametrize("name", [page for page in PAGES if re.match(r"theory/\d", page)])
def test_a_chapter_that_the_reading_order_names_leads_to_its_sections(name):
    if name.startswith("theory/10-"):
        return  # read when needed, says the table
    boxes = soup(name).select("nav.beside")
    assert len(boxes) == 1
    links = [tag["href"] for tag in boxes[0].find_all("a")]
    assert links
    assert all(link.startswith("../notebooks/0") for link in links)
    for link in links:  # and back
        place = link.removeprefix("../").partition("#")[0]
        assert any(href == f"../{name}" for href in hrefs(place)), (
            f"{place} does not lead back to {name}"
        )
