"""The book on a phone: apart, so that two workers share its pages."""

import pytest

from tests.browser.book_site import PAGES, fits, opened, violations

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_phone_and_axe_finds_nothing_there(chromium, site, name):
    with opened(chromium, site + name, width=390) as page:
        assert fits(page, 390) == []
        assert violations(page) == []
