"""The book on a phone: apart, so that two workers share its pages."""

import pytest

from tests.browser.book_site import CHAPTERS, NOTEBOOKS, PAGES, fits, opened, violations

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_phone_and_what_is_wider_scrolls_by_keyboard(chromium, site, name):
    with opened(chromium, site + name, width=390) as page:
        assert fits(page, 390) == []


@pytest.mark.parametrize("name", ["index.html", CHAPTERS[0], NOTEBOOKS[0], "theory/glossary.html"])
def test_axe_finds_nothing_on_a_phone(chromium, site, name):
    with opened(chromium, site + name, width=390) as page:
        assert violations(page) == []
