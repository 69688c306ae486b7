"""The figure to play with: its numbers are those of the lab, and a keyboard works it."""

import itertools
import math

import pytest
import torch

from labsupport.attention import online_softmax
from tests.browser.book_site import opened

pytestmark = pytest.mark.browser

SOFTMAX = "theory/02-online-softmax.html"
ROWS = [[2.0, 1, 4, 3, 1, 0, 5, 2], [990.0, 1000, 995, 1001, -998, 1003, 1000, 999]]


def test_the_keyboard_moves_the_steps_and_the_sentence_follows(chromium, site):
    with opened(chromium, site + SOFTMAX) as page:
        page.get_by_role("button", name="Next block").focus()
        for _ in range(5):  # once more than there are blocks
            page.keyboard.press("Enter")
        assert page.locator("#play-softmax tbody tr").count() == 4
        assert "O = o / l = 5.6263" in page.locator("#play-softmax .says").inner_text()


def test_the_steps_of_online_softmax_end_where_the_lab_s_do(chromium, site):
    values = list(range(1, 9))
    with opened(chromium, site + SOFTMAX) as page:
        for row, block in itertools.product(ROWS, range(1, 9)):
            last = page.evaluate(
                "([scores, values, block]) => labSoftmax.run(scores, values, block).at(-1)",
                [row, values, block],
            )
            scores = torch.tensor([row], dtype=torch.float64)
            weights, lse = online_softmax(scores, block_size=block)
            expected = (weights @ torch.tensor(values, dtype=torch.float64)).item()
            assert last["m"] == max(row)
            assert last["o"] / last["l"] == pytest.approx(expected, rel=1e-12)
            assert last["m"] + math.log(last["l"]) == pytest.approx(lse.item(), rel=1e-12)
