"""The figures to play with: their numbers are those of the lab, and a keyboard works them."""

import itertools
import math

import pytest
import torch

from labsupport.analysis.tiles import best_choice, describe_choice, tile_choices
from labsupport.attention import online_softmax
from tests.browser.book_site import opened

pytestmark = pytest.mark.browser

TILES = "theory/04-io-complexity.html"
SOFTMAX = "theory/02-online-softmax.html"
CASES = [
    (512, 32, 1024, "bfloat16", False, "version1"),
    (512, 128, 49152, "float32", True, "version2"),
    (4096, 128, 232448, "bfloat16", False, "version2"),
    (65536, 256, 232448, "bfloat16", True, "version1"),
]
NAMES = ("seqlen", "head_dim", "fast_bytes", "dtype", "causal", "order")
COLUMNS = {"blockQ": "block_q", "blockK": "block_k", "fits": "fits"} | {
    name: f"{name}_bytes" for name in ("needed", "read", "written", "traffic")
}
ROWS = [[2.0, 1, 4, 3, 1, 0, 5, 2], [990.0, 1000, 995, 1001, -998, 1003, 1000, 999]]

COMPUTED = """(one) => {
  const given = {seqlen: one.seqlen, headDim: one.head_dim, fastBytes: one.fast_bytes,
    itemsize: one.dtype == "float32" ? 4 : 2, causal: one.causal, order: one.order};
  const table = labTiles.choices(given);
  const least = labTiles.best(table);
  return {
    rows: table.rows, compulsory: table.compulsory, textbook: String(table.textbook),
    best: least ? [least.blockQ, least.blockK] : null,
    said: table.rows.map((r) => labTiles.describe(table, given.fastBytes, r.blockQ, r.blockK)),
  };
}"""


def test_the_tiles_in_javascript_are_those_of_the_lab(chromium, site):
    with opened(chromium, site + TILES) as page:
        for case in (dict(zip(NAMES, values, strict=True)) for values in CASES):
            computed = page.evaluate(COMPUTED, case)
            table = tile_choices(**case)
            for key, column in COLUMNS.items():
                assert [row[key] for row in computed["rows"]] == list(table[column]), (case, key)
            facts = table.attrs["case"]
            assert computed["compulsory"] == facts["compulsory_bytes"]
            assert float(computed["textbook"]) == pytest.approx(
                facts["textbook_bytes"], nan_ok=True
            )
            best = best_choice(table)
            assert computed["best"] == (list(best) if best else None)
            said = [describe_choice(table, r.block_q, r.block_k) for r in table.itertuples()]
            assert computed["said"] == said, case


def test_the_keyboard_moves_the_tiles_and_the_sentence_follows(chromium, site):
    with opened(chromium, site + SOFTMAX) as page:
        page.get_by_role("button", name="Next block").focus()
        for _ in range(5):  # once more than there are blocks
            page.keyboard.press("Enter")
        assert page.locator("#play-softmax tbody tr").count() == 4
        assert "O = o / l = 5.6263" in page.locator("#play-softmax .says").inner_text()
    with opened(chromium, site + TILES) as page:
        says = page.locator("#play-tiles .says")
        assert says.inner_text().startswith("Br = 128, Bc = 64: needs")
        page.locator("#play-tiles input[name=block_q]").focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(400)
        assert says.inner_text().startswith("Br = 256, Bc = 64")
        slider = page.locator("#play-tiles input[name=block_q]")
        assert slider.get_attribute("aria-valuetext") == "256 queries"
        # A screen reader says the slider's value: the same beside it is for the eyes only.
        assert page.locator("#play-tiles output:not([aria-hidden=true])").count() == 0
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        page.wait_for_timeout(400)
        assert "does not fit" in says.inner_text()
        page.get_by_role("button", name="Take the pair that moves least").focus()
        page.keyboard.press("Enter")
        page.wait_for_timeout(400)
        best = best_choice(tile_choices(4096, 64, fast_bytes=99 * 1024))
        assert says.inner_text().startswith(f"Br = {best[0]}, Bc = {best[1]}: needs")
        for picture in page.locator("#play-tiles svg").all():
            assert len(picture.get_attribute("aria-label").split()) > 5


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
