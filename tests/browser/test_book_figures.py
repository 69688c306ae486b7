"""The figures to play with: their numbers are those of the lab, and a keyboard works them."""

import math

import pytest
import torch

from labsupport.analysis.tiles import best_choice, describe_choice, fast_memories, tile_choices
from labsupport.attention import online_softmax
from tests.browser.book_site import opened

pytestmark = pytest.mark.browser

TILES = "theory/04-io-complexity.html"
SOFTMAX = "theory/02-online-softmax.html"
CASES = [
    {"seqlen": seqlen, "head_dim": head_dim, "fast_bytes": fast, "dtype": dtype}
    for seqlen in (512, 4096, 65536)
    for head_dim in (32, 128, 256)
    for fast in (1024, 49152, 232448)
    for dtype in ("bfloat16", "float32")
]
ROWS = [
    [2.0, 1, 4, 3, 1, 0, 5, 2],
    [0.0, 1, 2, 3, 4, 5, 6, 7],
    [990.0, 1000, 995, 1001, 998, 1003, 1000, 999],
    [-3.5, -700, 12.25, 12.25, 0, -1, 8, 3],
]

COMPUTED = """(given) => {
  const table = labTiles.choices(given);
  const least = labTiles.best(table);
  return {
    rows: table.rows, compulsory: table.compulsory, textbook: String(table.textbook),
    best: least ? [least.blockQ, least.blockK] : null,
    said: table.rows.map((r) => labTiles.describe(table, given.fastBytes, r.blockQ, r.blockK)),
  };
}"""


@pytest.mark.parametrize("order", ["version1", "version2"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_tiles_in_javascript_are_those_of_the_lab(chromium, site, order, causal):
    with opened(chromium, site + TILES) as page:
        for case in CASES:
            given = {
                "seqlen": case["seqlen"],
                "headDim": case["head_dim"],
                "fastBytes": case["fast_bytes"],
                "itemsize": {"bfloat16": 2, "float32": 4}[case["dtype"]],
                "causal": causal,
                "order": order,
            }
            computed = page.evaluate(COMPUTED, given)
            table = tile_choices(**case, causal=causal, order=order)
            for key, column in {
                "blockQ": "block_q",
                "blockK": "block_k",
                "fits": "fits",
                "needed": "needed_bytes",
                "read": "read_bytes",
                "written": "written_bytes",
                "traffic": "traffic_bytes",
            }.items():
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


def test_the_memories_to_choose_from_are_those_of_the_hardware_table(chromium, site):
    with opened(chromium, site + TILES) as page:
        options = page.locator("#play-tiles select[name=fast_bytes] option")
        shown = [(one.inner_text(), int(one.get_attribute("value"))) for one in options.all()]
    assert shown == fast_memories()


def test_the_keyboard_moves_the_tiles_and_the_sentence_follows(chromium, site):
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


@pytest.mark.parametrize("block", range(1, 9))
def test_the_steps_of_online_softmax_end_where_the_lab_s_do(chromium, site, block):
    values = list(range(1, 9))
    with opened(chromium, site + SOFTMAX) as page:
        for row in ROWS:
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


def test_the_steps_are_those_of_the_chapter_s_worked_example(chromium, site):
    with opened(chromium, site + SOFTMAX) as page:
        button = page.get_by_role("button", name="Next block")
        button.focus()
        for _ in range(5):  # once more than there are blocks
            page.keyboard.press("Enter")
        rows = page.locator("#play-softmax tbody tr").all_inner_texts()
        chapter = page.locator("main").inner_text()
        says = page.locator("#play-softmax .says").inner_text()
        assert button.get_attribute("aria-disabled") == "true"
        page.get_by_role("button", name="From the start").focus()
        page.keyboard.press("Enter")
        assert button.get_attribute("aria-disabled") == "false"
        assert page.locator("#play-softmax tbody tr").count() == 0
    assert len(rows) == 4
    for row in rows:
        *_, m, factor, l, o = row.split("\t")
        factor = {"0": "0.000", "1": "1.000"}.get(factor, factor)
        assert f"m = {m}  alpha = {factor}  l = {l}  o = {o}" in chapter
    assert "O = o / l = 5.6263" in says
    assert "L = m + ln l = 5.4984" in says


def test_without_javascript_a_reader_sees_a_table_and_words(chromium, site):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(site + TILES)
    assert page.locator("#play-tiles .fallback table").is_visible()
    assert page.locator("#play-tiles tbody tr").count() == 7
    assert not page.locator("#play-tiles form").is_visible()
    assert "need JavaScript" in page.locator("#play-tiles").inner_text()
    page.goto(site + SOFTMAX)
    assert not page.locator("#play-softmax form").is_visible()
    assert "worked example above" in page.locator("#play-softmax").inner_text()
    context.close()
