"""The book in a browser: nothing from outside, readable by all."""

import json
import re

import pytest

from labsupport.paths import notebooks_in
from tests.browser.book_site import BOOK, CHAPTERS, NOTEBOOKS, PAGES, fits, opened, violations

pytestmark = pytest.mark.browser


def test_the_book_has_every_chapter_and_every_notebook(project):
    made = {f"theory/{path.stem}.html" for path in (project / "theory").glob("*.md")}
    made |= {
        str(path.relative_to(project).with_suffix(".html"))
        for path in notebooks_in(project / "notebooks")
    }
    assert made | {"index.html", "search.html"} <= set(PAGES)
    assert NOTEBOOKS
    assert CHAPTERS


def asked_elsewhere(page, site):
    return [url for url in page.requests if not url.startswith((site, "data:"))]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_readable_by_all_and_asks_nobody_else_for_anything(chromium, site, name):
    with opened(chromium, site + name) as page:
        assert asked_elsewhere(page, site) == []
        assert page.complaints == []
        assert fits(page, 1280) == []
        assert violations(page) == []
        light = background(page)
        page.evaluate("document.documentElement.dataset.theme = 'dark'")  # as the button does it
        assert background(page) != light
        assert violations(page, ["color-contrast", "link-in-text-block"]) == []
        if name in (*CHAPTERS, *NOTEBOOKS):
            check_text(page, short="further/" in name)
    with opened(chromium, site + name, width=390) as phone:
        assert fits(phone, 390) == []
        assert violations(phone) == []


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def check_text(page, short):
    """Formulas are set, pictures described, and terms linked once and in prose only."""
    formulas = page.locator(".math").count()
    assert formulas or short
    assert page.locator(".math mjx-container svg").count() >= formulas
    assert page.locator(".math mjx-assistive-mml math").count() >= formulas
    assert page.locator("mjx-merror, [data-mml-node=merror]").count() == 0
    words = page.evaluate("[...document.querySelectorAll('main img')].map((one) => one.alt)")
    assert [alt for alt in words if len(alt.split()) < 5] == []
    targets = page.evaluate("[...document.querySelectorAll('a.term')].map((one) => one.href)")
    assert len(targets) >= (1 if short else 5)
    assert len(targets) == len(set(targets))
    within = "h1, h2, h3, h4, pre, code, .math, nav, a, .cell_output"
    assert page.locator(within).locator("a.term").count() == 0


# Lines of code in a sentence that end within a word: the last letter, and the first of the next.
BROKEN = """() => [...document.querySelectorAll("main :not(pre) > code")].flatMap((code) => {
  const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  let before = " ", top = null, broken = [];
  while (walker.nextNode()) [...walker.currentNode.data].forEach((letter, i) => {
    range.setStart(walker.currentNode, i);
    range.setEnd(walker.currentNode, i + 1);
    const box = range.getClientRects()[0];
    if (box && top !== null && box.top > top + 4 && /[a-z0-9]/i.test(before) && /\\w/.test(letter))
      broken.push(`${before}|${letter} in ${code.textContent}`);
    [before, top] = [letter, box ? box.top : top];
  });
  return broken;
})"""


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_phone_shows_code_in_whole_words_and_figures_enlarged(chromium, site, name):
    with opened(chromium, site + name, width=400) as phone:
        phone.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert phone.evaluate(BROKEN) == []
        large = phone.locator("dialog.enlarged")
        for figure in phone.locator("main img").all():
            figure.click()
            assert large.locator("img").bounding_box()["width"] >= 960
            assert large.locator("img").get_attribute("alt") == figure.get_attribute("alt")
            phone.keyboard.press("Escape")
            assert not large.is_visible()


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_further_part_is_folded_until_a_link_leads_into_it(chromium, site, name):
    with opened(chromium, site + name) as page:
        part = page.locator("section#further > details")
        sections = part.locator("section")
        assert sections.count() >= 1
        assert not sections.first.is_visible()
        anchor = sections.last.get_attribute("id")
        page.evaluate("(anchor) => { location.hash = anchor; }", anchor)
        page.wait_for_timeout(200)
        assert sections.last.is_visible()
        assert page.locator(f"#{anchor}").bounding_box()["y"] < 900


def test_the_first_stop_of_the_keyboard_skips_to_the_text(chromium, site):
    with opened(chromium, site + CHAPTERS[0]) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('href')") == "#main-content"
        page.keyboard.press("Enter")
        assert page.url.endswith("#main-content")
        page.keyboard.press("Tab")
        assert page.evaluate("!!document.activeElement.closest('main')")


def test_a_search_by_keyboard_finds_the_section_and_stays_on_this_machine(chromium, site):
    with opened(chromium, site + "index.html") as page:
        page.keyboard.press("Control+k")
        page.keyboard.type("online softmax")
        page.keyboard.press("Enter")
        page.wait_for_selector("#search-results li a")
        page.wait_for_load_state("networkidle")
        found = [link.get_attribute("href") for link in page.locator("#search-results a").all()]
        assert any(href.startswith("theory/02-online-softmax.html") for href in found[:3]), found
        page.locator("#search-results a").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_load_state("networkidle")
        assert "softmax" in page.locator("h1").first.inner_text().lower()
        assert asked_elsewhere(page, site) == []
    # Without a server, too.
    with opened(chromium, f"{(BOOK / 'search.html').as_uri()}?q=rescaling") as page:
        page.wait_for_selector("#search-results li a")
        assert asked_elsewhere(page, "file:") == []


def test_a_term_shows_its_meaning_to_the_keyboard_until_escape(chromium, site):
    with opened(chromium, site + CHAPTERS[0]) as page:
        term = page.locator("a.term").first
        meaning = page.locator(f"#{term.get_attribute('aria-describedby')}")
        assert not meaning.is_visible()
        term.focus()
        assert meaning.is_visible()
        assert len(meaning.inner_text().split()) > 8
        page.keyboard.press("Escape")
        assert not meaning.is_visible()
        term.hover()
        meaning.wait_for(state="visible")
        box = meaning.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 1280
        term.click()
        assert re.search(r"/theory/glossary\.html#term-", page.url)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_leads_into_jupyterlab_and_folds_its_solutions_away(
    chromium, site, name, project
):
    stem = name.removeprefix("notebooks/").removesuffix(".html")
    with opened(chromium, site + name) as page:
        assert page.locator("main table th").count()
        assert page.locator("main table th:not([scope])").count() == 0
        link = page.locator(".open-notebook a")
        assert link.get_attribute("href") == f"http://localhost:8888/lab/tree/{stem}.ipynb"
        assert "make lab" in page.locator(".open-notebook").inner_text()
        assert "HIDDEN TESTS" not in page.content()
        assert "BEGIN SOLUTION" not in page.content()
        solutions = page.locator("details.solution")
        cells = json.loads((project / "notebooks" / f"{stem}.ipynb").read_text())["cells"]
        solved = sum("### BEGIN SOLUTION" in "".join(cell["source"]) for cell in cells)
        assert solutions.count() == solved > 0
        code = solutions.first.locator("pre")
        assert not code.is_visible()
        solutions.first.locator("summary").focus()
        page.keyboard.press("Enter")
        assert code.is_visible()
        assert page.locator("pre", has_text="raise NotImplementedError").count() >= solved
