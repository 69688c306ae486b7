"""The book on a phone: apart, so that two workers share its pages."""

import pytest

from tests.browser.book_site import PAGES, fits, opened, violations

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module", params=PAGES)
def phone(request, chromium, site):
    """Each page, opened once for both tests."""
    with opened(chromium, site + request.param, width=390) as page:
        yield page


def test_a_page_fits_a_phone_and_what_is_wider_scrolls_by_keyboard(phone):
    assert fits(phone, 390) == []


def test_axe_finds_nothing_on_a_phone(phone):
    assert violations(phone) == []
