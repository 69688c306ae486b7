"""The book in a browser: nothing from outside, readable by all."""

import re

import pytest

from tests.browser.book_site import BOOK, CHAPTERS, NOTEBOOKS, PAGES, fits, opened, violations

pytestmark = pytest.mark.browser


SET_THEME = """(theme) => {
  const before = getComputedStyle(document.body).backgroundColor;
  document.documentElement.dataset.theme = theme;
  return before;
}"""


def test_the_book_has_every_chapter_and_every_notebook(project):
    made = {f"theory/{path.stem}.html" for path in (project / "theory").glob("*.md")}
    made |= {f"notebooks/{path.stem}.html" for path in (project / "notebooks").glob("*.ipynb")}
    assert made | {"index.html", "search.html"} <= set(PAGES)
    assert NOTEBOOKS
    assert CHAPTERS


@pytest.fixture(scope="module", params=PAGES)
def desktop(request, chromium, site):
    """Each page, opened once for all tests that only look at it."""
    with opened(chromium, site + request.param) as page:
        yield page


@pytest.fixture
def text(desktop):
    """The same, of chapters and notebooks."""
    if not desktop.url.endswith((*CHAPTERS, *NOTEBOOKS)):
        pytest.skip("neither a chapter nor a notebook")
    return desktop


def test_a_page_asks_nobody_else_for_anything_and_reports_no_error(desktop, site):
    assert [url for url in desktop.requests if not url.startswith((site, "data:"))] == []
    assert desktop.complaints == []


def test_a_page_fits_a_desktop_and_what_is_wider_scrolls_by_keyboard(desktop):
    assert fits(desktop, 1280) == []


def test_axe_finds_nothing_to_complain_about(desktop):
    assert violations(desktop) == []


def test_axe_finds_nothing_in_the_dark(desktop):
    # As the theme's button does it; loading each page once more would cost a minute.
    light = desktop.evaluate(SET_THEME, "dark")
    try:
        assert desktop.evaluate("getComputedStyle(document.body).backgroundColor") != light
        assert violations(desktop, ["color-contrast", "link-in-text-block"]) == []
    finally:
        desktop.evaluate(SET_THEME, "light")


def test_every_formula_is_set_without_an_error_and_carries_mathml(text):
    formulas = text.locator(".math").count()
    assert formulas
    assert text.locator(".math mjx-container svg").count() >= formulas
    assert text.locator(".math mjx-assistive-mml math").count() >= formulas
    assert text.locator("mjx-merror, [data-mml-node=merror]").count() == 0


def test_every_picture_is_described_in_words(text):
    words = text.evaluate("[...document.querySelectorAll('main img')].map((one) => one.alt)")
    assert [alt for alt in words if len(alt.split()) < 5] == []


def test_a_term_is_linked_once_on_a_page_and_in_prose_only(text):
    targets = text.evaluate("[...document.querySelectorAll('a.term')].map((one) => one.href)")
    assert len(targets) >= 5
    assert len(targets) == len(set(targets))
    within = "h1, h2, h3, h4, pre, code, .math, nav, a, .cell_output"
    assert text.locator(within).locator("a.term").count() == 0


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_results_in_tables_say_what_their_headers_head(chromium, site, name):
    with opened(chromium, site + name) as page:
        headers = page.locator("main table th")
        assert headers.count()
        assert page.locator("main table th:not([scope])").count() == 0


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
        assert [url for url in page.requests if not url.startswith((site, "data:"))] == []


def test_the_search_works_without_a_server_too(chromium):
    with opened(chromium, f"{(BOOK / 'search.html').as_uri()}?q=rescaling") as page:
        page.wait_for_selector("#search-results li a")
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


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


@pytest.mark.parametrize("name", CHAPTERS[:2])
def test_a_meaning_stays_for_the_keyboard_when_the_focus_scrolls_the_page(chromium, site, name):
    with opened(chromium, site + name) as page:
        term = page.locator("a.term").last
        meaning = page.locator(f"#{term.get_attribute('aria-describedby')}")
        term.focus()
        page.wait_for_timeout(800)  # the page may glide to its place
        assert page.evaluate("window.scrollY") > 0
        assert meaning.is_visible()
        above, box = term.bounding_box(), meaning.bounding_box()
        gap = max(box["y"] - above["y"] - above["height"], above["y"] - box["y"] - box["height"])
        assert 0 <= gap < 40, "it stands beside its term"
        page.keyboard.press("Escape")
        page.mouse.wheel(0, -50)
        page.wait_for_timeout(400)
        assert not meaning.is_visible(), "what was closed stays closed"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_leads_into_jupyterlab_and_folds_its_solutions_away(chromium, site, name):
    stem = name.removeprefix("notebooks/").removesuffix(".html")
    with opened(chromium, site + name) as page:
        link = page.locator(".open-notebook a")
        assert link.get_attribute("href") == f"http://localhost:8888/lab/tree/{stem}.ipynb"
        assert "make lab" in page.locator(".open-notebook").inner_text()
        assert "HIDDEN TESTS" not in page.content()
        assert "BEGIN SOLUTION" not in page.content()
        solutions = page.locator("details.solution")
        assert solutions.count() >= 5
        code = solutions.first.locator("pre")
        assert not code.is_visible()
        solutions.first.locator("summary").focus()
        page.keyboard.press("Enter")
        assert code.is_visible()
        assert page.locator("pre", has_text="raise NotImplementedError").count() >= 5


def test_a_reader_may_choose_the_dark(chromium, site):
    with opened(chromium, site + "index.html") as page:
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.locator("button.theme-switch-button, .theme-switch-button").first.click()
        page.get_by_text("Dark", exact=True).first.click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light


def test_the_cards_of_the_first_page_keep_their_text_off_their_edges(chromium, site):
    with opened(chromium, site + "index.html") as page:
        cards = page.locator(".way").evaluate_all(
            "cards => cards.map((card) => getComputedStyle(card).paddingInline)"
        )
    assert cards == ["16px"] * 3
